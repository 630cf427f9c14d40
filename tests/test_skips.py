"""Whoever reads why a test was skipped knows what to install or to set. `make skips` lists all reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
REMEDIES = (
    "pip install", "the extra `", "install ", "EVERFED_", "needs ", "is not there", "only Linux", "cannot be mounted",
    "permitted", "mount here",
)  # fmt: skip


def skips(path: Path) -> Iterator[tuple[int, str]]:
    """(line, reason as it is written) of everything in a file that may skip a test."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            reason = {keyword.arg: keyword.value for keyword in node.keywords}.get("reason")
            if node.func.attr in ("importorskip", "skipif"):
                yield node.lineno, ast.unparse(reason) if reason else ""
            elif node.func.attr == "skip" and ast.unparse(node.func.value) == "pytest":
                yield node.lineno, ast.unparse(reason or node.args[0]) if reason or node.args else ""


def test_every_skip_says_what_is_missing() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        for line, reason in skips(path):
            named = any(word in reason for word in REMEDIES) or reason == "str(missing)"  # the data set's own message
            assert named, f"{path}:{line}: say what to install or to set, not {reason or 'nothing'}"


def main() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        for line, reason in skips(path):
            print(f"{path.relative_to(TESTS.parent)}:{line}: {reason}")


if __name__ == "__main__":
    main()
