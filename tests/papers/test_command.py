"""`everfed reproduce` on a small set that lies where MNIST would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from everfed.cli import app
from everfed.experiments.papers.shortfall import SETS, Published
from everfed.experiments.papers.tables import Paper, PrintedCell

QUICK = ("--scale", "0.005", "--columns", "rotated", "--methods", "fedavg,fedgp", "--seeds", "2", "--engine", "eager",
         "--jobs", "1")  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 grey squares, brighter with their class, as mnist.npz; no other set. Few to test on, since every method is
    tested ten times on up to ten tasks."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("data")

    def part(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(count) % 10
        x = np.zeros((count, 28, 28), dtype=np.uint8)
        x[:, 6:22, 6:22] = (20 * y + 20)[:, None, None] + rng.integers(0, 20, size=(count, 16, 16))
        return x, y

    (x_train, y_train), (x_test, y_test) = part(2000), part(20)
    np.savez(folder / "mnist.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return folder


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVERFED_DATA", raising=False)
    return tmp_path


def reproduce(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["reproduce", *arguments])


def test_help_teaches_with_examples() -> None:
    text = reproduce("--help").output
    assert "everfed reproduce --list" in text and "everfed reproduce fedgp/table1" in text


def test_the_list_shows_every_table_and_what_it_costs() -> None:
    text = reproduce("--list").output
    assert "fedgp/table1" in text and "stamp/table5" in text
    assert "2,572.5 M" in text  # FedGP's Table 1: 5 (2 x 12 x 15.5 + 5 x 13 + 5 x 15.5)
    rows = json.loads(reproduce("fedgp", "--list", "--json", "--seeds", "1").output)
    assert {row["table"].partition("/")[0] for row in rows} == {"fedgp"}
    assert next(row for row in rows if row["table"] == "fedgp/table1")["runs"] == 44
    refused = reproduce("nowhere", "--list")
    assert refused.exit_code == 2 and "papers: fedgp, fedssi, coordinated, mfcl, stamp" in refused.output


def test_a_table_from_nothing_and_again(data: Path) -> None:
    first = reproduce("fedgp/table1", *QUICK, "--data", str(data))
    assert first.exit_code == 0, first.output
    assert "4 runs (0 finished already); 2 of 2 cells can be run; --scale 0.005" in first.output
    assert "not judged:" in first.output and "68.02 ± 3.1" in first.output
    out = Path("runs/reproduce-0.005")
    results = sorted(out.rglob("result.json"))
    assert [path.parent.name for path in results] == ["fedavg-0", "fedavg-1", "fedgp-0", "fedgp-1"]
    found = json.loads((out / "fedgp-table1.json").read_text())
    acc = [json.loads(path.read_text())["metrics"]["acc"] for path in results[:2]]
    assert found["cells"][0]["ours"] == pytest.approx(100 * sum(acc) / 2)
    reasons = found["cells"][0]["lacking"]
    assert "--scale 0.005" in reasons and "141 of the 60,000 published training samples" in reasons
    assert found["cells"][1]["effect"]["ours"]["count"] == 2 and "not judged" in found["cells"][1]["verdict"]

    before = {path: path.stat().st_mtime_ns for path in results}
    forgetting = reproduce("fedgp/table7", *QUICK, "--data", str(data))
    assert "4 runs (4 finished already)" in forgetting.output
    assert {path: path.stat().st_mtime_ns for path in results} == before


@pytest.mark.usefixtures("one_core")
def test_cells_that_cannot_run_are_listed_and_the_others_run(data: Path) -> None:
    options = ("--scale", "small", "--methods", "fedavg", "--seeds", "1", "--columns", "rotated,CIFAR", "--json")
    done = reproduce("fedgp/table1", *options, "--data", str(data))
    assert done.exit_code == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    assert found["event"] == "reproduction" and "4 of 5 cells missing" in found["summary"]
    verdicts = {cell["dataset"]: cell["verdict"] for cell in found["cells"]}
    assert "data set 'cifar100' was not found" in verdicts["sequential-CIFAR100 (Task-IL)"]
    assert "--scale 0.05" in verdicts["rotated-MNIST (Domain-IL)"]


TINY = ["train.rounds_per_task=1", "train.local_epochs=1", "stream.tasks=2", "stream.clients=2"]
BLOCK = {"dataset": "d", "recipe": "demo", "sets": TINY}
OWN = {
    "name": "Own",
    "title": "A paper of our own",
    "baseline": "FedAvg",
    "methods": {"FedAvg": "fedavg", "ER": "er"},
    "metrics": {"Acc_T": {"measure": "acc"}},
    "seeds": 3,
    "states": [{"columns": ["d"], "dataset": "digits", "tasks": 2, "clients": 2, "rounds": 1, "epochs": 1}],
    "items": [{"name": "table1", "about": "digits", "table": "T1", "blocks": [BLOCK]}],
}


def test_a_table_at_full_scale_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """With printed numbers so spread that nothing can be said, and one that no run can reach."""
    printed = {"FedAvg": (50.0, 30.0), "ER": (250.0, 1.0)}
    rows = tuple(
        PrintedCell("Own", "T1", "d", "", method, "Acc_T", *numbers, "") for method, numbers in printed.items()
    )
    monkeypatch.setattr("everfed.experiments.papers.tables.papers", lambda: {"own": Paper.model_validate(OWN)})
    monkeypatch.setattr("everfed.experiments.papers.planning.printed", lambda: rows)
    done = reproduce("own/table1", "--engine", "eager", "--seeds", "3")
    assert done.exit_code == 0, done.output
    found = json.loads(Path("runs/reproduce/own-table1.json").read_text())
    assert [cell["level"] for cell in found["cells"]] == ["unresolved", "differs"]
    assert [(cell["seeds"], cell["paper_seeds"]) for cell in found["cells"]] == [(3, 3), (3, 3)]
    assert "2 cells judged: 0 equivalent, 1 differs, 1 unresolved" in done.output
    effect = found["cells"][1]["effect"]
    assert (effect["paper"], effect["ours"]["count"], effect["covers"]) == (200.0, 3, False)

    monkeypatch.setitem(SETS, "digits", Published(5000))
    again = reproduce("own/table1", "--engine", "eager", "--seeds", "3")
    assert "not judged: 1,438 of the 5,000 published training samples" in again.output
    assert "0 cells judged: 0 equivalent, 0 differs, 0 unresolved; 2 cells not judged" in again.output


def test_nothing_that_can_run_is_an_error_with_the_reasons() -> None:
    refused = reproduce("fedgp/table1", "--methods", "fedavg", "--columns", "CIFAR100")
    assert refused.exit_code == 2
    assert "nothing can be run" in refused.output and "no data folder is named" in refused.output
    assert not Path("runs").exists()


def test_what_the_command_line_refuses() -> None:
    for arguments, message in (
        ((), "name a table"),
        (("fedgp/table0",), "there is no table 'fedgp/table0'. Did you mean"),
        (("fedgp/fig1",), "there is nothing to run; a diagram"),
        (("--list", "--methods", "der"), "--list shows whole tables"),
        (("fedgp/table1", "--scale", "tiny"), "--scale must be a number above 0 and at most 1, or small; got 'tiny'"),
        (("fedgp/table1", "--methods", "der2"), "--methods der2: not in fedgp/table1"),
        (("fedgp/table1", "--columns", "audio"), "no cell of fedgp/table1 is left"),
    ):
        refused = reproduce(*arguments)
        assert refused.exit_code == 2 and message in refused.output, refused.output


def test_an_engine_is_chosen_and_an_unknown_one_refused(data: Path) -> None:
    options = ("--scale", "0.005", "--methods", "fedavg", "--seeds", "1", "--columns", "rotated", "--data", str(data))
    assert reproduce("fedgp/table1", *options, "--engine", "eager").exit_code == 0
    (made,) = Path("runs").rglob("result.json")
    assert json.loads(made.read_text())["environment"]["engine"] == "eager"
    refused = reproduce("fedgp/table1", *options, "--engine", "steam")
    assert refused.exit_code == 2 and "engine.kind must be one of" in refused.output


def test_runs_of_another_scale_are_not_mistaken(data: Path) -> None:
    options = ("--methods", "fedavg", "--seeds", "1", "--columns", "rotated", "--data", str(data), "--out", "mine")
    options += ("--engine", "eager")
    assert reproduce("fedgp/table1", *options, "--scale", "0.005").exit_code == 0
    refused = reproduce("fedgp/table1", *options, "--scale", "0.01")
    assert refused.exit_code == 2 and "belongs to another recipe or --scale" in refused.output


def test_more_seeds_than_the_recipe_has() -> None:
    from everfed.experiments.papers.reproducing import seeds_of

    assert seeds_of("fedgp/table1-rotated-mnist", None) == [0, 1, 2, 3, 4]
    assert seeds_of("fedgp/table1-rotated-mnist", 2) == [0, 1]
    assert seeds_of("fedgp/table1-rotated-mnist", 7) == [0, 1, 2, 3, 4, 5, 6]
