"""The examples of docs/coming-from.md work as they are written."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

import everfed

PAGE = (Path(__file__).resolve().parents[1] / "docs/coming-from.md").read_text()
FILES = re.findall(r"<!-- (?:example|recipe): (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
RUNS = re.findall(r"<!-- run -->\n```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flower_app", raising=False)
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_section_has_an_example() -> None:
    assert [name for name, _ in FILES] == [
        "flower_app.py",
        "pycil.toml",
        "fed_mammoth.toml",
        "oiafed.toml",
        "pfllib.toml",
    ] and len(RUNS) == 2


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_the_python_examples_run(work: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "main.py").write_text(RUNS[number])
    runpy.run_path(str(work / "main.py"), run_name="main")
    assert 0 <= float(capsys.readouterr().out.split()[0]) <= 1


def test_the_avalanche_example_learns(work: Path) -> None:
    (work / "main.py").write_text(RUNS[1])
    found = runpy.run_path(str(work / "main.py"), run_name="main")
    assert found["stream"].labels(0) == (0, 5) and found["result"].metrics["learning_accuracy"] > 0.8


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("pycil.toml", (2, 4, 6, 8)),
        ("fed_mammoth.toml", (0, 1)),
        ("oiafed.toml", (0, 1)),
        ("pfllib.toml", tuple(range(10))),
    ],
)
def test_the_recipes_run(work: Path, name: str, first: tuple[int, ...]) -> None:
    result = everfed.run(name, work / "run", scale=0.1)
    assert tuple(result.data["stream"]["labels"][0]) == first
