"""Adding tasks to a run that is finished, as a researcher who wants to see two more of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import everfed
from everfed.cli import app
from everfed.method import Part
from everfed.store.event_log import read_log

RECIPE: dict[str, Any] = {
    "name": "digits",
    "stream": {"dataset": "digits", "scenario": "domain-incremental", "clients": 3, "max_train": 90, "max_test": 30},
    "train": {"rounds_per_task": 2},
    "engine": {"kind": "eager"},
}


@dataclass(frozen=True)
class Hurried(Part):
    """Its term grows over the tasks that there will be."""

    name = "hurried"

    def loss(self, step: Any) -> Any:
        return step.all_outputs.square().mean() * step.facts.tasks


def of(method: str, **stream: Any) -> dict[str, Any]:
    return {**RECIPE, "method": {"name": method}, "stream": {**RECIPE["stream"], **stream}}


@pytest.mark.parametrize("method", ["fedgp+der", "ewc"])
def test_a_run_with_tasks_added_is_the_run_that_had_them_from_the_start(tmp_path: Path, method: str) -> None:
    """Also where the last round left out what prepares the next task: what is remembered of it, EWC's Fisher matrix."""
    short, whole = tmp_path / "short", tmp_path / "whole"
    everfed.run(of(method, tasks=2), short)
    found = CliRunner().invoke(app, ["resume", str(short), "--tasks", "4"])
    assert found.exit_code == 0, found.output
    expected = everfed.run(of(method, tasks=4), whole)
    model, same = load_file(short / "model.safetensors"), load_file(whole / "model.safetensors")
    assert all(torch.equal(model[name], same[name]) for name in same)
    result = everfed.resume(short)
    assert result.data["accuracy_matrix"] == expected.data["accuracy_matrix"] and result.metrics == expected.metrics
    assert result.data["cost"]["bytes_up"] == expected.data["cost"]["bytes_up"]
    assert (short / "recipe.toml").read_text() == (whole / "recipe.toml").read_text()
    assert [line.task for line in read_log(short).evaluations.values()] == [0, 1, 2, 3]


def test_killed_between_the_files_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from everfed.store.run import RunFolder

    everfed.run(of("der", tasks=2), tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "reopen", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        everfed.resume(tmp_path / "run", tasks=3)
    extended = everfed.resume(tmp_path / "run", tasks=3)
    assert extended.metrics == everfed.run(of("der", tasks=3), tmp_path / "whole").metrics
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    assert everfed.resume(tmp_path / "run", tasks=3).metrics == extended.metrics
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("recipe", "tasks", "reason"),
    [
        (of("fedavg", tasks=2, scenario="class-incremental"), 3, "the stream has other samples in task 1"),
        (of("fedavg", tasks=2), 1, "it has 2 tasks already"),
        ({**of("fedavg", tasks=2), "eval": {"zero_shot": True}}, 3, "every row of its scores is over all tasks"),
        ({**of("", tasks=2), "method": {"parts": ["fedavg", Hurried()]}}, 3, "part 'hurried' uses facts.tasks"),
    ],
)  # fmt: skip
def test_a_run_that_would_have_been_another_is_refused_and_left_as_it_is(
    tmp_path: Path, recipe: dict[str, Any], tasks: int, reason: str
) -> None:
    finished = everfed.run(recipe, tmp_path / "run")
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(everfed.UserError, match=reason):
        everfed.resume(tmp_path / "run", tasks=tasks)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files
    assert everfed.resume(tmp_path / "run").metrics == finished.metrics


def test_an_unfinished_run_is_finished_first(tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "phase" and event["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        everfed.run(of("fedavg", tasks=2), tmp_path / "run", observers=[stop])
    with pytest.raises(everfed.UserError, match="is not finished; go on with `everfed resume"):
        everfed.resume(tmp_path / "run", tasks=3)
    everfed.resume(tmp_path / "run")
    everfed.resume(tmp_path / "run", tasks=3)
