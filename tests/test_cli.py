"""The command line: what it does, what it says, and what it refuses before anything is made."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from everfed import errors, models, streams
from everfed.cli import app
from everfed.commands.sweep import split_values
from everfed.errors import RecipeError
from everfed.experiments.grid import folder_name
from everfed.methods import registry as methods
from everfed.recipe import read
from everfed.recipe import shipped as recipes
from everfed.reports.formats import markdown_table, with_deviation
from tests.support.child import Child, Ended, until

TINY = """\
[stream]
dataset = "digits"
transform = "rotate"
tasks = 2
clients = 3
max_train = 120
max_test = 60

[model]
kind = "mlp"
hidden = [8]

[train]
rounds_per_task = 2
batch_size = 16
optimizer = { kind = "sgd", lr = 0.1 }

[engine]
kind = "eager"

[method]
name = "der"
memory = { size = 10 }
"""
PART = '''\
"""A part of a user's own."""

from dataclasses import dataclass
from typing import ClassVar

from everfed.method import Part


@dataclass(frozen=True)
class Halved(Part):
    """Halves every gradient."""

    factor: float = 0.5
    name: ClassVar[str] = "halved"

    def gradient(self, step, gradient):
        return gradient.vector * self.factor
'''


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for every test, with one small recipe in it and no data folder named."""
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVERFED_DATA", raising=False)
    return tmp_path


def everfed(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def done(*arguments: str) -> str:
    result = everfed(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def process(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "everfed", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )


def result_of(folder: str | Path) -> dict:
    return json.loads((Path(folder) / "result.json").read_text())


# light and helpful -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    ["init", "run", "resume", "compare", "sweep", "list", "show", "doctor", "demo", "report", "samples", "ui"],
)
def test_help_teaches_with_examples(command: str) -> None:
    assert f"everfed {command}" in done(command, "--help")
    assert "Example" in done(command, "--help")
    assert command in done("--help")


def test_a_run_names_the_settings_that_only_a_comparison_gives_its_method() -> None:
    (given := Path("tiny.toml")).write_text(f'{TINY}\n[compare.options]\nder = ["method.der.weight=2.0"]\n')
    no_data = ("run", str(given), "--set", "stream.dataset='mnist'", "--method")
    expected = "`everfed compare` runs der with settings of its own: --set method.der.weight=2.0"
    assert expected in everfed(*no_data, "der").stderr
    assert "settings of its own" not in everfed(*no_data, "fedavg").stderr


def test_help_says_what_an_argument_is() -> None:
    assert "A TOML file, or a shipped recipe" in done("run", "--help")


def test_without_a_command_the_help_is_shown() -> None:
    assert "Start here" in everfed().output


def test_help_and_the_library_come_without_torch() -> None:
    modules = "everfed, everfed.cli, everfed.api, everfed.recipe, everfed.experiments.jobs"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_embedded_data_come_without_importing_scikit_learn(work: Path) -> None:
    (work / "look.py").write_text(
        "import sys, everfed.data; everfed.data.load('digits'); assert 'sklearn' not in sys.modules"
    )
    ended = Child(work, module="look").wait()
    assert ended.code == 0, ended.stderr


def test_the_version() -> None:
    import everfed as package

    assert done("--version").strip() == package.__version__


def test_the_library_offers_its_names_and_no_others() -> None:
    import everfed as package

    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = package.nonsense


# run and resume --------------------------------------------------------------------------------------------------


def test_run_leaves_the_run_folder_and_prints_its_numbers() -> None:
    text = done("run", "tiny.toml", "--set", "engine.kind=auto")
    folder = Path("runs/tiny-der-0")
    assert f"run folder: {folder}" in text
    assert "task 2/2, round 4/4" in text
    result = result_of(folder)
    assert (result["method"], result["seed"]) == ("der", 0)
    assert f"Acc {100 * result['metrics']['acc']:.2f} %" in text


def test_options_reach_the_run(work: Path) -> None:
    done("run", "tiny.toml", "--method", "fedgp", "--seed", "4", "--set", "stream.tasks=1", "--out", "mine")
    result = result_of("mine")
    assert (result["method"], result["seed"], len(result["accuracy_matrix"])) == ("fedgp", 4, 1)
    assert not (work / "runs").exists()


def test_another_method_takes_the_files_options_that_fit_it() -> None:
    """Ten samples of 8x8 pixels with label and id, not the 200 that a buffer holds by default."""
    done("run", "tiny.toml", "--method", "er", "--out", "ten")
    done("run", "tiny.toml", "--method", "er", "--out", "two", "--set", "method.memory.size=2")
    ten, two = (result_of(folder)["cost"]["client_state_bytes"] for folder in ("ten", "two"))
    assert ten - two == 3 * (10 - 2) * (64 + 8 + 8)


def test_scale_shrinks_rounds_and_data() -> None:
    everything = ["--set", "stream.max_train=1437"]
    done("run", "tiny.toml", *everything, "--scale", "0.5", "--out", "half")
    done("run", "tiny.toml", *everything, "--out", "whole")
    half, whole = result_of("half"), result_of("whole")
    assert (half["cost"]["rounds"], whole["cost"]["rounds"]) == (2, 4)
    trained = whole["stream"]["samples"]["train"]
    assert half["stream"]["samples"]["train"] == pytest.approx(trained * 0.5**0.5, rel=0.02)  # as are the rounds


def test_json_gives_one_object_per_line_and_nothing_else() -> None:
    lines = [json.loads(line) for line in done("run", "tiny.toml", "--json").splitlines()]
    kinds = [line["event"] for line in lines]
    assert kinds[0] == "start" and kinds[-2:] == ["end", "result"]
    assert {"phase", "evaluation"} <= set(kinds)
    assert lines[-1]["metrics"] == result_of(lines[-1]["folder"])["metrics"]


def test_a_finished_run_is_not_run_again_but_resuming_it_is_harmless() -> None:
    done("run", "tiny.toml", "--out", "mine")
    before = {path: path.stat().st_mtime_ns for path in Path("mine").rglob("*") if path.is_file()}
    again = everfed("run", "tiny.toml", "--out", "mine")
    assert again.exit_code == 2 and "finished run" in again.stderr
    assert "Acc" in done("resume", "mine")
    assert {path: path.stat().st_mtime_ns for path in Path("mine").rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_result(work: Path) -> None:
    """As a user would; tests/faults kills at every moment, in processes that need not import torch first."""
    done("run", "tiny.toml", "--set", "train.rounds_per_task=30", "--out", "whole")
    command = ["run", "tiny.toml", "--set", "train.rounds_per_task=30", "--out", "killed", "--checkpoint-every", "0"]
    child = subprocess.Popen(
        [sys.executable, "-m", "everfed", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while child.poll() is None and not list(Path("killed").glob("checkpoint/*/run.safetensors")):
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert not (work / "killed/result.json").exists(), "it should have been killed in its middle"
    done("resume", "killed")
    assert Path("killed/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    assert result_of("killed")["accuracy_matrix"] == result_of("whole")["accuracy_matrix"]


def test_ctrl_c_says_how_to_go_on(work: Path) -> None:
    command = ["run", "tiny.toml", "--set", "train.rounds_per_task=1000000", "--set", "engine.kind=processes"]
    child = Child(work, *command, "--out", "long", terminal=True)
    log = Path("long/events.jsonl")
    until(lambda: log.exists() and '"phase"' in log.read_text(), child)
    child.ctrl_c()
    ended = child.wait()
    assert ended.code == 130
    assert "interrupted; `everfed resume long` goes on" in ended.stderr and "Traceback" not in ended.stderr


INTERRUPTED = """\
import os, signal
from dataclasses import dataclass
from typing import ClassVar

from everfed.method import Part


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):  # the handler runs between two of these
        pass


class Destroyed:
    def __del__(self):
        ctrl_c()


@dataclass(frozen=True)
class InDestructor(Part):
    name: ClassVar[str] = "in-destructor"

    def receive(self, client):
        if client.round == 1 and client.id == 0:
            Destroyed()


@dataclass(frozen=True)
class InSetUp(Part):
    name: ClassVar[str] = "in-set-up"

    def check(self, parts, optimizer):
        ctrl_c()
        return ()
"""


def interrupted(work: Path, part: str, real: bool = False) -> Ended:
    """A run whose part sends itself a ctrl-C. real: in a process that was started as a user would."""
    (work / "interrupted.py").write_text(INTERRUPTED)
    sets = [f'method.parts=["fedavg", "interrupted:{part}"]', "train.rounds_per_task=4"]
    command = ["run", "tiny.toml", "--out", "mine", *(word for one in sets for word in ("--set", one))]
    if not real:
        return Child(work, *command).wait()
    ended = process(*command, preexec_fn=heeding_ctrl_c)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def heeding_ctrl_c() -> None:
    """Whoever is started in a shell's background ignores it, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_ctrl_c_that_python_ignores_ends_the_run_at_the_next_event(work: Path) -> None:
    """In a destructor an exception is printed and forgotten, KeyboardInterrupt too."""
    ended = interrupted(work, "InDestructor", real=True)
    assert "Exception ignored in" in ended.stderr  # so that this test tests what it says
    assert ended.code == 130
    assert "interrupted; `everfed resume mine` goes on where it stopped" in ended.stderr
    events = [json.loads(line) for line in Path("mine/events.jsonl").read_text().splitlines()]
    assert max(event["round"] for event in events if event["event"] == "phase") == 1
    assert events[-1]["event"] == "fault" and events[-1]["message"].startswith("KeyboardInterrupt")


def test_a_ctrl_c_before_the_first_round_leaves_nothing_to_resume(work: Path) -> None:
    ended = interrupted(work, "InSetUp")
    assert ended.code == 130
    assert "interrupted; no round had begun, so nothing was kept; the same command begins anew" in ended.stderr
    assert not Path("mine").exists()


def test_the_run_folder_is_there_before_torch_is_imported() -> None:
    """So that a run killed while Python still imports can be resumed."""
    code = """
import sys
from pathlib import Path

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.exit(0 if Path("early/recipe.toml").exists() else 3)

sys.meta_path.insert(0, Watch())
from everfed.cli import app
app(["run", "tiny.toml", "--method", "er", "--out", "early"])
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_users_own_part_needs_no_registration(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(work)
    (work / "my_halved.py").write_text(PART)
    parts = 'method.parts=["fedavg", { part = "my_halved:Halved", factor = 0.25 }]'
    done("run", "tiny.toml", "--set", parts, "--out", "own")
    assert result_of("own")["method"] == "fedavg+halved"


# refusals --------------------------------------------------------------------------------------------------------

REFUSED = [
    (["run", "nothing"], "nothing is neither a file nor a shipped recipe"),
    (["run", "tiny.toml", "--set", "train.round=3"], "train.round is not a key"),
    (["run", "tiny.toml", "--set", "train.rounds_per_task=0"], "train.rounds_per_task must be greater than or equal"),
    (["run", "tiny.toml", "--set", "stream.taks=3"], "Did you mean tasks?"),
    (["run", "tiny.toml", "--set", "stream.tasks=0"], "stream.tasks: expected a whole number"),
    (["run", "tiny.toml", "--set", "stream.dataset=mnist"], "stream.dataset: data set 'mnist'"),
    (["run", "tiny.toml", "--set", "stream.partition.kind=odd"], "unknown kind 'odd'; allowed: iid"),
    (["run", "tiny.toml", "--set", "model.kind=odd"], "model.kind: there is no model 'odd'. Did you mean"),
    (["run", "tiny.toml", "--set", "model.kind=no.such:Net"], "module 'no.such' cannot be imported"),
    (["run", "tiny.toml", "--method", "fedgp+dr"], "there is no method 'fedgp+dr'. Did you mean fedgp+der, "),
    (["run", "tiny.toml", "--method", "fedavg", "--set", "method.der.weight=1"], "method.der names no part"),
    (["run", "tiny.toml", "--set", "method.der.wait=1"], "method.der.wait is not an option"),
    (["run", "tiny.toml", "--set", 'method.parts=["fedavg", "der"]'], "part 'der' needs part 'memory'"),
    (["run", "tiny.toml", "--seed", "-1"], "seed must be greater than or equal to 0"),
    (["run", "tiny.toml", "--scale", "0"], "--scale must be above 0"),
    (["run", "tiny.toml", "--out", "tiny.toml"], "tiny.toml is a file; name a folder"),
    (["resume", "."], "is not a run"),
    (["resume", "absent"], "absent does not exist"),
    (["report", "."], "error: "),
    (["compare", "tiny.toml"], "name the methods with --methods"),
    (["compare", "tiny.toml", "--methods", "fedavg,odd"], "--method odd: method.name: there is no method 'odd'."),
    (["compare", "tiny.toml", "--methods", "fedavg", "--seeds", "a"], "--seeds a: write whole numbers"),
    (
        ["compare", "tiny.toml", "--methods", "fedavg,er", "--set", "method.der.weight=1"],
        "none of the methods fedavg, er has that part",
    ),
    (["sweep", "tiny.toml", "--grid", "train.lr"], "--grid train.lr: write it as key=value,value"),
    (["sweep", "tiny.toml", "--grid", "train.lr=1,2"], "train.lr is not a key. Did you mean train.optimizer.lr?"),
    (["compare", "tiny.toml", "--methods", " ,"], "--methods names none; write them"),
    (["near-optimality", "--out", "tiny.toml"], "tiny.toml: File exists"),
    (["sweep", "tiny.toml", "--grid", "eval.split=test,validation"], "never on test data"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_refusals_come_before_anything_is_made(work: Path, arguments: list[str], message: str) -> None:
    result = everfed(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert [path for path in work.rglob("*") if path.is_file()] == [work / "tiny.toml"]
    assert not list(work.glob("*/*")), "no run folder is left"


def test_a_refusal_names_the_file_and_the_line(work: Path) -> None:
    (work / "bad.toml").write_text(TINY.replace('"rotate"', '"rotat"'))
    assert everfed("run", "bad.toml").stderr == (
        "error: bad.toml, line 3: stream.transform: 'rotat' is not one of the allowed values: rotate, permute. "
        "Did you mean rotate?\n"
    )


def test_a_method_that_does_not_fit_the_stream_is_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(work)
    (work / "my_knowing.py").write_text(PART + '\n    def needs(self):\n        return {"task_id"}\n')
    run = everfed("run", "tiny.toml", "--set", 'method.parts=["fedavg", "my_knowing:Halved"]')
    assert run.exit_code == 2
    assert "part 'halved' must know which task a client is in" in run.stderr
    assert not list(work.glob("runs/*"))


def test_a_real_process_gives_exit_code_2_without_traceback(work: Path) -> None:
    run = process("run", "tiny.toml", "--set", "train.round=3")
    assert run.returncode == 2
    assert run.stderr.startswith("error: --set train.round=3: train.round is not a key. Did you mean")
    assert "Traceback" not in run.stderr


def test_a_run_that_diverges_names_the_weights_of_its_method() -> None:
    result = everfed("run", "tiny.toml", "--method", "ewc", "--set", "method.ewc.weight=1e30")
    assert result.exit_code == 1
    assert result.stderr.rstrip().endswith("; lower train.optimizer.lr or method.ewc.weight (1e+30)")


def test_a_run_that_diverges_ends_with_exit_code_1_and_its_reason() -> None:
    result = everfed("run", "tiny.toml", "--set", "train.optimizer.lr=1e30")
    assert result.exit_code == 1
    assert "is not finite" in result.stderr and "lower train.optimizer.lr" in result.stderr
    assert "is not finite" not in result.stdout  # once is enough


@pytest.mark.parametrize("kind", ["eager", "processes"])
def test_a_bug_in_my_part_names_the_part_and_my_line_and_hides_everfeds(
    work: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.syspath_prepend(work)
    monkeypatch.setenv("PYTHONPATH", f"{work}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (work / "my_buggy.py").write_text(PART.replace("self.factor", "self.nonsense"))
    mine = ("--set", 'method.parts=["fedavg", "my_buggy:Halved"]', "--set", f"engine.kind={kind}", "--overwrite")
    run = everfed("run", "tiny.toml", *mine)
    assert run.exit_code == 1
    for said in ("AttributeError", "nonsense", "part 'halved'", "my_buggy.py, line "):
        assert said in run.stderr
    assert "everfed/core" not in run.stderr and "Traceback" not in run.stderr
    monkeypatch.setenv("EVERFED_TRACEBACK", "1")
    assert "nonsense" in str(everfed("run", "tiny.toml", *mine).exception)


def test_a_bug_of_everfeds_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests' folder stands for an installed package: no frame is a user's."""

    def broken(*_: object) -> None:
        raise TypeError("a bug")

    installed = errors._installed()
    monkeypatch.setattr(errors, "_installed", lambda: (*installed, str(Path(__file__).parent)))
    monkeypatch.setattr("everfed.commands.show._facts", broken)
    run = everfed("show", "der")
    assert run.exit_code == 1 and isinstance(run.exception, TypeError)


def test_a_data_folder_that_is_not_there_is_named() -> None:
    run = everfed("run", "fedgp/table1-rotated-mnist", "--data", "nowhere", "--dry-run")
    assert run.exit_code == 2 and "'mnist' was not found: the data folder" in run.stderr
    assert "nowhere does not exist" in run.stderr


# compare ---------------------------------------------------------------------------------------------------------


def compare(*more: str) -> str:
    return done("compare", "tiny.toml", "--methods", "fedavg,er", "--seeds", "0,1", "--out", "cells", *more)


@pytest.fixture(scope="module")
def finished_cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison that is finished; beside it, in cells.txt, what was printed."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "tiny.toml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "cells.txt").write_text(compare())
    return folder / "cells"


@pytest.fixture
def cells(work: Path, finished_cells: Path) -> None:
    """The same comparison, finished in this test's folder."""
    shutil.copytree(finished_cells, work / "cells")


@pytest.mark.usefixtures("cells")
def test_compare_makes_run_folders_and_one_sorted_table(finished_cells: Path) -> None:
    text = finished_cells.with_suffix(".txt").read_text()
    rows = json.loads(Path("cells/compare.json").read_text())["rows"]
    for row in rows:
        accuracies = [result_of(f"cells/{row['name']}-{seed}")["metrics"]["acc"] for seed in (0, 1)]
        mean = sum(accuracies) / 2
        assert row["metrics"]["acc"]["mean"] == pytest.approx(mean)
        assert row["metrics"]["acc"]["deviation"] == pytest.approx(abs(accuracies[0] - mean))  # population
        assert with_deviation(*(100 * row["metrics"]["acc"][key] for key in ("mean", "deviation"))) in text
    means = [row["metrics"]["acc"]["mean"] for row in rows]
    assert means == sorted(means, reverse=True)
    assert Path("cells/compare.md").read_text().startswith("| Method")
    with open("cells/compare.csv") as file:
        assert [line["name"] for line in csv.DictReader(file)] == [row["name"] for row in rows]


def test_compare_runs_a_method_with_its_own_options_and_the_command_line_s_after_them() -> None:
    options = '[compare]\nmethods = ["fedavg", "er"]\n[compare.options]\n'
    options += """er = ['train.optimizer={ kind = "adam", lr = 0.002 }', "method.er.batch=3"]\n"""
    Path("two.toml").write_text(TINY + options)
    done("compare", "two.toml", "--out", "own", "--set", "train.optimizer.lr=0.5")
    plain, own = (tomllib.loads(Path(f"own/{name}-0/recipe.toml").read_text()) for name in ("fedavg", "er"))
    assert own["train"]["optimizer"]["kind"] == "adam" and own["method"]["er"]["batch"] == 3
    assert plain["train"]["optimizer"].get("kind", "sgd") == "sgd"
    assert plain["train"]["optimizer"]["lr"] == own["train"]["optimizer"]["lr"] == 0.5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("der = ['train.batch_size=3']", r"compare: options.der: not among methods = \['fedavg'\]"),
        (
            "fedavg = ['train.batch_size']",
            r"compare: options.fedavg: write settings as key=value; got 'train.batch_size'",
        ),
    ],
)
def test_options_of_a_comparison_are_checked(options: str, problem: str) -> None:
    Path("two.toml").write_text(f'{TINY}[compare]\nmethods = ["fedavg"]\n[compare.options]\n{options}\n')
    with pytest.raises(RecipeError, match=problem):
        read("two.toml")


@pytest.mark.usefixtures("cells")
def test_compare_keeps_what_is_finished_and_runs_the_rest() -> None:
    before = Path("cells/er-0/result.json").stat().st_mtime_ns
    expected = Path("cells/er-1/model.safetensors").read_bytes()
    for path in ("result.json", "model.safetensors"):
        Path("cells/er-1", path).unlink()
    compare()
    assert Path("cells/er-0/result.json").stat().st_mtime_ns == before
    assert Path("cells/er-1/model.safetensors").read_bytes() == expected


@pytest.mark.usefixtures("cells")
def test_compare_refuses_cells_of_another_recipe() -> None:
    table = Path("cells/compare.json").read_bytes()
    for change in (["--set", "train.local_epochs=2"], ["--scale", "0.5"]):
        arguments = ["compare", "tiny.toml", "--methods", "fedavg,er", "--seeds", "0,1", "--out", "cells", *change]
        result = everfed(*arguments)
        assert result.exit_code == 2
        assert "cells/fedavg-0 belongs to another recipe or --scale; nothing was overwritten" in result.stderr
    assert Path("cells/compare.json").read_bytes() == table


@pytest.mark.usefixtures("cells")
def test_every_method_of_a_comparison_sees_the_same_stream() -> None:
    angles = {(seed, str(result_of(f"cells/{m}-{seed}")["stream"])) for m in ("fedavg", "er") for seed in (0, 1)}
    assert len(angles) == 2


def test_part_options_serve_the_methods_that_have_the_part() -> None:
    compare("--set", "method.memory.size=3")
    assert "size = 3" in Path("cells/er-0/recipe.toml").read_text()
    assert "[method.memory]" not in Path("cells/fedavg-0/recipe.toml").read_text()


def test_compare_takes_methods_and_seeds_from_the_recipe(work: Path) -> None:
    (work / "tiny.toml").write_text(TINY + '[compare]\nmethods = ["fedavg"]\nseeds = [5]\n')
    done("compare", "tiny.toml")
    assert result_of("runs/tiny-compare/fedavg-5")["seed"] == 5


def test_compare_as_json() -> None:
    lines = [json.loads(line) for line in compare("--json").splitlines()]
    assert lines[-1]["event"] == "comparison"
    assert {line.get("run") for line in lines[:-1]} == {f"cells/{m}-{s}" for m in ("fedavg", "er") for s in (0, 1)}


@pytest.mark.usefixtures("cells")
def test_a_class_incremental_comparison_shows_both_accuracies(work: Path) -> None:
    """Task-IL accuracy comes from the same logits; where tasks share their classes it would be the same column."""
    assert "Acc task-IL" not in compare()
    (work / "tiny.toml").write_text(TINY.replace('transform = "rotate"', 'scenario = "class-incremental"'))
    text = done("compare", "tiny.toml", "--methods", "fedavg", "--out", "by-class")
    by_task = result_of("by-class/fedavg-0")["by_logits"]["task"]["metrics"]["acc"]
    assert "Acc task-IL" in text and f"{100 * by_task:.2f} " in text


# sweep -----------------------------------------------------------------------------------------------------------


def test_sweep_chooses_on_validation_data() -> None:
    text = done("sweep", "tiny.toml", "--grid", "train.optimizer.lr=0.01,0.3", "--seeds", "0,1", "--out", "grid")
    assert "the recipe holds out no validation data; using eval.split=validation, stream.validation=0.1" in text
    found = json.loads(Path("grid/sweep.json").read_text())
    assert found["split"] == "validation"
    cells = {lr: [result_of(f"grid/train.optimizer.lr={lr}-{seed}") for seed in (0, 1)] for lr in ("0.01", "0.3")}
    for results in cells.values():
        assert all(result["split"] == "validation" for result in results)
        assert all(result["n_test"] == [result["stream"]["samples"]["validation"]] * 2 for result in results)
    best = max(cells, key=lambda lr: sum(result["metrics"]["acc"] for result in cells[lr]))
    assert found["best"] == f"--set train.optimizer.lr={best}"
    assert f"best: --set train.optimizer.lr={best}" in text


def test_sweep_respects_a_validation_share_of_the_recipes_own() -> None:
    text = done(
        "sweep", "tiny.toml", "--grid", "train.optimizer.lr=0.1", "--set", "stream.validation=0.3", "--out", "g"
    )
    assert "holds out no validation" not in text
    assert result_of("g/train.optimizer.lr=0.1-0")["stream"]["validation"] == 0.3


def test_sweep_goes_over_every_combination() -> None:
    grid = ["--grid", "train.local_epochs=1,2", "--grid", "method.der.weight=0.0,1.0"]
    lines = [json.loads(line) for line in done("sweep", "tiny.toml", *grid, "--out", "g", "--json").splitlines()]
    assert {row["name"] for row in lines[-1]["rows"]} == {
        f"--set train.local_epochs={epochs} --set method.der.weight={weight}"
        for epochs in (1, 2)
        for weight in (0.0, 1.0)
    }


def test_a_cell_that_diverges_does_not_stop_the_sweep() -> None:
    text = done("sweep", "tiny.toml", "--grid", "train.optimizer.lr=1e30,0.1", "--out", "g")
    assert "best: --set train.optimizer.lr=0.1" in text
    rows = json.loads(Path("g/sweep.json").read_text())["rows"]
    assert rows[-1]["metrics"] == {} and "not finite" in rows[-1]["runs"][0]["problem"]


def test_a_sweep_without_a_finished_cell_fails() -> None:
    result = everfed("sweep", "tiny.toml", "--grid", "train.optimizer.lr=1e30", "--out", "g")
    assert result.exit_code == 1
    assert "no cell finished" in result.stdout


def test_grid_values_split_at_commas_outside_brackets_and_quotes() -> None:
    assert split_values("0.1, 0.2") == ["0.1", "0.2"]
    assert split_values("[8],[8, 8]") == ["[8]", "[8, 8]"]
    assert split_values('{ kind = "iid" },{ kind = "shards", per_client = 2 }') == [
        '{ kind = "iid" }',
        '{ kind = "shards", per_client = 2 }',
    ]
    assert split_values('"a,b",c') == ['"a,b"', "c"]


def test_folder_names_hold_any_setting_and_stay_apart() -> None:
    assert folder_name(["a.b=1", "c=x"]) == "a.b=1,c=x"
    odd = {folder_name([f"a={value}"]) for value in ("[1, 2]", "[1/ 2]", "x" * 300, "x" * 301)}
    assert len(odd) == 4
    assert all(len(name) < 200 and "/" not in name for name in odd)


# demo and report -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_core")
def test_demo_prints_the_table_and_writes_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its figures; drawing them takes many seconds, and tests/reports does."""
    drawn: list[Path] = []
    monkeypatch.setattr("everfed.reports.paper.write", lambda groups, folder: drawn.append(folder))
    text = done("demo", "--scale", "0.01")
    assert drawn == ([Path("runs/demo/report/figures")] if find_spec("matplotlib") else [])
    assert "report: runs/demo/report.html" in text
    for method in ("fedavg", "der", "fedgp+der"):
        assert f"| {method} " in text
        assert method in Path("runs/demo/report.html").read_text()


@pytest.mark.slow
def test_the_demo_shows_that_fedgp_helps() -> None:
    done("demo")
    rows = {row["name"]: row["metrics"] for row in json.loads(Path("runs/demo/compare.json").read_text())["rows"]}
    for base in ("fedavg", "der"):
        assert rows["fedgp+der"]["acc"]["mean"] > rows[base]["acc"]["mean"] + 0.1
        assert rows["fedgp+der"]["forgetting"]["mean"] < rows[base]["forgetting"]["mean"]


@pytest.mark.usefixtures("cells")
def test_report_of_a_comparison() -> None:
    assert done("report", "cells", "--out", "page.html", "--no-figures") == "report: page.html\n"
    assert "fedavg" in Path("page.html").read_text()


# list, doctor, tables --------------------------------------------------------------------------------------------


def listed(kind: str, *more: str) -> dict[str, str]:
    return json.loads(done("list", kind, "--json", *more))


def test_list_shows_everything_with_a_line_about_it() -> None:
    assert listed("methods") == methods.names()
    assert set(models.MODELS) <= set(listed("models"))
    assert set(listed("recipes")) == set(recipes.names())
    assert set(listed("parts")) == set(methods.part_classes())
    assert set(streams.SCENARIOS) <= set(listed("streams"))
    for kind in ("methods", "streams", "datasets", "models", "recipes", "parts"):
        assert all(listed(kind).values())
        assert f"| {kind}" in done("list", kind)


def test_list_datasets_finds_a_users_own_set(work: Path) -> None:
    import numpy as np

    x, y = np.zeros((4, 8, 8), np.uint8), np.arange(4)
    np.savez(work / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert listed("datasets", "--data", str(work))["mine"] == f"found: {work / 'mine.npz'}"
    assert listed("datasets")["digits"].startswith("found")


def test_listing_something_unknown_names_the_kinds() -> None:
    result = everfed("list", "people")
    assert result.exit_code == 2
    assert "'methods'" in result.stderr and "'recipes'" in result.stderr


def test_doctor_prints_what_it_found(work: Path) -> None:
    import torch

    found = json.loads(done("doctor", "--json", "--data", str(work / "absent")))
    assert found["torch"] == torch.__version__
    assert found["data folder"].endswith("absent does not exist")
    assert found["data set digits"].startswith("embedded")
    assert {"everfed", "python", "device", "cores", "threads", "extra hub", "extra ui"} <= set(found)
    assert "| torch" in done("doctor")


def test_markdown_tables_are_aligned() -> None:
    assert markdown_table(["a", "long"], [["x", "1"], ["yyyy", "2"]]).splitlines() == [
        "| a    | long |",
        "|------|------|",
        "| x    | 1    |",
        "| yyyy | 2    |",
    ]
