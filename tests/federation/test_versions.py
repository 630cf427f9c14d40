"""Flower through its public door: what is imported, and which versions are accepted. `make newest` runs the
federation's tests with the newest version that pyproject.toml allows."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from everfed.errors import UserError
from everfed.federation import flower
from everfed.federation.flower import BELOW, LEAST, require_flower

FOLDER = Path(flower.__file__).parent
PUBLIC = {"flwr.app", "flwr.serverapp", "flwr.clientapp"}
APPS = {"client_app.py", "records.py", "replies.py", "server_app.py"}  # they run in Flower's processes


def imports(path: Path) -> set[str]:
    """The modules of Flower that a file imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    found |= {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    return {module for module in found if module.split(".")[0] == "flwr"}


def test_only_the_apps_import_flower_and_only_what_is_public() -> None:
    using = {path: found for path in FOLDER.parents[1].rglob("*.py") if (found := imports(path))}
    assert {path.name for path in using} == APPS and {path.parent for path in using} == {FOLDER}
    assert set().union(*using.values()) == PUBLIC


@pytest.mark.parametrize(("version", "fits"), [("1.40.0", False), (f"{LEAST}.0", True), ("1.99", True), (BELOW, False)])
def test_versions_outside_the_range_are_refused(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "version", lambda name: version)
    if fits:
        require_flower()
    else:
        with pytest.raises(
            UserError, match=re.escape(f"flwr {version} does not fit; install 'flwr>={LEAST},<{BELOW}'")
        ):
            require_flower()


def test_the_range_is_that_of_the_package() -> None:
    extras = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"flwr>={LEAST},<{BELOW}" in extras["flower"]
