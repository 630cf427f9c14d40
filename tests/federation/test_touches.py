"""What everfed uses of Flower outside its public interface: listed, in one place, and checked against the version."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from everfed.federation.flower import require_flower, touches
from everfed.federation.flower.touches import TOUCHES, FlowerVersionError, Touch, problems

FOLDER = Path(touches.__file__).parent
PUBLIC = {"flwr.app", "flwr.serverapp", "flwr.clientapp"}


@pytest.mark.parametrize("touch", TOUCHES, ids=lambda touch: touch.where)
def test_the_installed_flower_has_it(touch: Touch) -> None:
    assert touch.problem() == ""


def imports(path: Path) -> dict[str, set[str]]:
    """{module of Flower: names that are imported from it}."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "flwr":
            found.setdefault(node.module, set()).update(one.name for one in node.names)
        if isinstance(node, ast.Import):
            found |= {one.name: set() for one in node.names if one.name.split(".")[0] == "flwr"}
    return found


def test_only_one_folder_imports_flower_and_what_is_not_public_is_listed() -> None:
    """Messages of its protocol (flwr.proto) are what the network carries; a change there shows in the names' own."""
    listed = {touch.where.replace(":", ".") for touch in TOUCHES}
    unlisted = set()
    for path in FOLDER.parents[1].rglob("*.py"):
        for module, names in imports(path).items():
            assert path.parent == FOLDER or module == "flwr.serverapp", f"{path} imports {module}"
            for name in names if module not in PUBLIC and not module.startswith("flwr.proto") else ():
                full = f"{module}.{name}"
                if not any(one == full or one.startswith(f"{full}.") for one in listed):
                    unlisted.add(f"{path.name}: {full}")
    assert unlisted == set()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (Touch("flwr.supercore.gone:Name", "a test"), "flwr.supercore.gone:Name is missing (a test)"),
        (Touch("flwr.supercore.fab:Gone", "a test"), "flwr.supercore.fab:Gone is missing (a test)"),
        (
            Touch("flwr.supercore.retry:exponential", "a test", ("max_delay", "least")),
            "flwr.supercore.retry:exponential has no least (a test)",
        ),
        (
            Touch("flwr.supercore.runtime:RuntimeHttpClient", "a test", attributes=("AcquireTask", "Gone")),
            "flwr.supercore.runtime:RuntimeHttpClient has no Gone (a test)",
        ),
    ],
)
def test_another_version_is_refused_with_the_touch_that_failed(
    changed: Touch, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(touches, "installed_version", lambda: "9.9.9")
    require_flower()  # another version on which everything fits is used
    monkeypatch.setattr(touches, "TOUCHES", (*TOUCHES, changed))
    assert problems() == [said]
    with pytest.raises(FlowerVersionError, match=r"flwr 9\.9\.9 does not fit; install 1\.41\.0 or 1\.42\.0: "):
        require_flower()
