"""`everfed.reports.write` and the command: what lies where, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from everfed.commands.report import report
from everfed.errors import UserError
from everfed.reports.html import write
from tests.reports.folders import finished

TABLES = {"comparison", "cost", "bytes_by_part", "paired", "accuracy_matrix", "runs"}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    finished(folder / "a", "fedavg", 0)
    finished(folder / "b", "fedavg", 1)
    finished(folder / "c", "der (x/y)", 0)
    return folder


def test_all_files_are_written(runs: Path, tmp_path: Path) -> None:
    page = write([runs], tmp_path / "out")
    assert page == tmp_path / "out" / "report.html" and page.read_text().startswith("<!doctype html>")
    tables = {path.name for path in (tmp_path / "out" / "report" / "tables").iterdir()}
    assert tables == {f"{name}.{suffix}" for name in TABLES for suffix in ("md", "csv", "tex")}
    drawn = {path.name for path in (tmp_path / "out" / "report" / "figures").iterdir()}
    names = {"acc", "loss", "acc_t", "forgetting", "bytes", "traffic", "time", "peak_memory", "client_state"}
    names |= {"who_saw_what", "accuracy_matrix_fedavg", "accuracy_matrix_der__x_y"}
    assert drawn == {f"{name}.{suffix}" for name in names for suffix in ("png", "pdf")}
    for path in (tmp_path / "out" / "report" / "figures").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG\r\n" if path.suffix == ".png" else b"%PDF-"), path


def test_the_page_can_be_named(runs: Path, tmp_path: Path) -> None:
    assert write([runs / "a"], tmp_path / "deep" / "mine.html", figures=False) == tmp_path / "deep" / "mine.html"
    assert {path.name for path in (tmp_path / "deep" / "mine").iterdir()} == {"tables"}


@pytest.mark.slow
def test_the_same_runs_give_the_same_figures(runs: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write([runs / "a"], tmp_path / name)
    for path in (tmp_path / "one" / "report" / "figures").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / "report" / "figures" / path.name).read_bytes()


def test_without_matplotlib_it_says_what_to_do(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"--no-figures .* pip install 'everfed\[plots\]'"):
        write([runs], tmp_path / "out", figures=True)
    assert not (tmp_path / "out").exists()
    assert write([runs], tmp_path / "out", figures=False).exists()


def test_a_place_that_cannot_be_written_to(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write the report to"):
        write([runs], tmp_path / "file" / "report.html", figures=False)


def test_the_command(runs: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(report)
    done = CliRunner().invoke(app, [str(runs / "a"), str(runs / "c"), "--no-figures"])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == f"report: {runs / 'a' / 'report.html'}"
    done = CliRunner().invoke(app, [str(runs), "--out", str(tmp_path / "x.html"), "--no-figures"])
    assert done.exit_code == 0 and (tmp_path / "x.html").exists()
