"""Which package of everfed may import which: every allowed arrow, and nothing else. Dependencies point down."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "everfed"
GROUND = {"errors", "naming", "wheels", "everfed"}  # light modules that import no package
ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "metrics": set(),
    "core": {"kernels", "metrics"},
    "method": {"core"},
    "store": {"core"},
    "models": {"core", "kernels", "method"},
    "data": {"core", "kernels", "method", "metrics", "store"},
    "streams": {"core", "data", "method", "metrics"},
    "methods": {"core", "data", "method", "metrics", "models"},
    "recipe": {"core", "method", "methods"},
    "privacy": {"core", "method", "methods", "store"},
    "engines": {"core", "kernels", "store"},
    "reports": {"core", "metrics", "recipe", "store"},
    "session": {"core", "data", "engines", "method", "methods", "metrics", "models", "privacy", "recipe", "store",
                "streams"},
    "api": {"recipe", "reports", "session", "store"},
    "experiments": {"api", "core", "engines", "methods", "metrics", "privacy", "recipe", "reports", "session", "store"},
    "federation": {"api", "core", "data", "engines", "privacy", "recipe", "session", "store"},
}  # fmt: skip
TOP = {"commands", "cli", "__main__", "__init__"}  # may import everything; nothing imports them


def packages() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).with_suffix("").parts[0], path


def imported(path: Path) -> set[str]:
    """The packages and modules right below everfed that a file imports when it runs."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "everfed":
            below = [n.name for n in node.names if (ROOT / n.name).is_dir() or (ROOT / f"{n.name}.py").is_file()]
            found |= {f"everfed.{name}" for name in below} or {"everfed"}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {(name.split(".") + ["everfed"])[1] for name in found if name.split(".")[0] == "everfed"}


@pytest.mark.parametrize("package", [*ALLOWED, *sorted(GROUND - {"everfed"})])
def test_only_the_allowed_arrows_exist(package: str) -> None:
    allowed = ALLOWED.get(package, set()) | GROUND | {package}
    if package in GROUND:
        allowed = GROUND
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for own, path in packages()
        if own == package
        for name in imported(path)
    }
    assert {(path, name) for path, name in found if name not in allowed} == set()


def test_every_package_has_its_arrows() -> None:
    assert {name for name, _ in packages()} == {*ALLOWED, *TOP, *(GROUND - {"everfed"})}


def test_the_arrows_have_no_cycle() -> None:
    left = {package: set(arrows) for package, arrows in ALLOWED.items()}
    while left:
        free = {package for package, arrows in left.items() if not arrows & set(left)}
        assert free, f"a cycle among {sorted(left)}"
        left = {package: arrows for package, arrows in left.items() if package not in free}
