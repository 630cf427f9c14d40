"""everfed as a Flower app: a few lines that point into this package, which every SuperNode has installed.

`everfed serve` submits it; `everfed federation app DIR` writes it out for a site that uses `flwr run`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from everfed.federation.supervisor import environment
from everfed.store.files import make_folder

PUBLISHER, NAME, VERSION = "everfed", "everfed-app", "1.0.0"
PROJECT = f"""\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{NAME}"
version = "{VERSION}"
description = "Continual federated learning with everfed"
license = "Apache-2.0"
dependencies = [] # everfed is there; a SuperLink installs what is named here from an index

[tool.hatch.build.targets.wheel]
packages = ["everfed_app"]

[tool.flwr.app]
publisher = "{PUBLISHER}"

[tool.flwr.app.components]
serverapp = "everfed_app.server:app"
clientapp = "everfed_app.client:app"

[tool.flwr.app.config]
recipe = ""
out = ""
data-dir = ""
scale = 1.0
checkpoint-every = 5.0
"""
_POINTER = '"""{what}."""\n\nfrom everfed.federation.flower.{module} import app\n\n__all__ = ["app"]\n'


def files() -> dict[str, bytes]:
    """The app's files by path."""
    client = _POINTER.format(what="What a SuperNode runs for each message", module="client_app")
    server = _POINTER.format(what="What a SuperLink runs", module="server_app")
    return {
        "pyproject.toml": PROJECT.encode(),
        "everfed_app/__init__.py": b'"""everfed as a Flower app."""\n',
        "everfed_app/client.py": client.encode(),
        "everfed_app/server.py": server.encode(),
    }


def write(folder: Path) -> None:
    """Write the app out."""
    for name, content in files().items():
        make_folder((folder / name).parent)
        (folder / name).write_bytes(content)


def bundle(folder: Path) -> bytes:
    """The app as Flower carries it, made in `folder`. The same wherever the same versions are installed."""
    write(folder / "app")
    for older in folder.glob("*.fab"):
        older.unlink()
    words = ["flwr", "build", "--app", str(folder / "app")]
    subprocess.run(words, cwd=folder, env=environment(folder), check=True, stdout=subprocess.DEVNULL)
    [made] = folder.glob("*.fab")
    return made.read_bytes()
