"""everfed as a Flower app: a few lines that point into this package, which every SuperNode has installed.

`everfed serve` submits it; `everfed federation app DIR` writes it out for a site that uses `flwr run`.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

from everfed.store.files import make_folder

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "everfed-app"
version = "1.0.0"
description = "Continual federated learning with everfed"
license = "Apache-2.0"
dependencies = [] # everfed is there; a SuperLink installs what is named here from an index

[tool.hatch.build.targets.wheel]
packages = ["everfed_app"]

[tool.flwr.app]
publisher = "everfed"

[tool.flwr.app.components]
serverapp = "everfed_app.server:app"
clientapp = "everfed_app.client:app"

[tool.flwr.app.config]
recipe = "demo"
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


@dataclass(frozen=True)
class Bundle:
    """An app as Flower carries it."""

    hash_str: str
    content: bytes


@functools.cache
def bundle() -> Bundle:
    """The app's bundle. Its hash is the same wherever the same version of everfed is installed."""
    from everfed.federation.flower.internals import build_fab_from_files

    content, _ = build_fab_from_files(files())
    return Bundle(hashlib.sha256(content).hexdigest(), content)


def write(folder: Path) -> None:
    """Write the app out."""
    for name, content in files().items():
        make_folder((folder / name).parent)
        (folder / name).write_bytes(content)
