"""What an earlier version of everfed left behind is read, reported, gone on with and used: folders of `make.py`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import everfed
from everfed.methods import registry
from everfed.methods.replay.memory import Policy
from everfed.naming import load_object
from everfed.session import saved_model
from tests.compat import make
from tests.support import bits

HERE = Path(__file__).parent
ROUNDS = 12


def copied(name: str, to: Path) -> Path:
    return shutil.copytree(HERE / name, to / "run")


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / name / "expected.json").read_text())
    return found


@pytest.mark.parametrize("name", make.RUNS)
def test_a_stopped_run_goes_on_to_the_bits_of_the_version_that_began_it(name: str, tmp_path: Path) -> None:
    folder = copied(f"{name}/stopped", tmp_path)
    before = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    after: list[dict[str, Any]] = []
    result = everfed.resume(folder, progress=False, observers=[after.append])
    reached, wanted = bits.fingerprint(folder, result.data, [*before, *after]), expected(name)
    rounds = [event["round"] for event in after if event["event"] == "phase"]
    assert 0 < min(rounds) < max(rounds) == ROUNDS - 1  # it went on
    if wanted.pop("probe") != make.probe():  # a machine with other instructions: its numbers differ in the last bits
        wanted["model"] = wanted["state"] = reached["model"] = reached["state"] = {}
        for one in (wanted, reached):
            one["metrics"] = one["scores"] = one["phases"] = None
    assert json.loads(json.dumps(reached)) == wanted


@pytest.mark.parametrize("name", make.FINISHED)
def test_a_finished_run_is_read_and_reported(name: str, tmp_path: Path) -> None:
    folder = copied(f"{name}/finished", tmp_path)
    wanted = expected(name)["metrics"]
    result = everfed.resume(folder)  # finished: returned as it is
    assert result.data["metrics"] == wanted
    assert len(result.history) == ROUNDS
    page = everfed.report(folder, figures=False).read_text()
    assert f"{100 * wanted['acc']:.1f}" in page and make.recipe(name)["method"]["name"] in page


@pytest.mark.parametrize("name", make.FINISHED)
def test_a_saved_model_is_loaded_and_predicts(name: str, tmp_path: Path) -> None:
    folder = copied(f"{name}/finished", tmp_path)
    loaded = everfed.load(folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    state = loaded.model.state_dict()
    assert state.keys() == tensors.keys() and all(torch.equal(state[key], tensors[key]) for key in tensors)
    assert loaded.description.classes == 10
    assert loaded.predict(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)).shape == (3,)


def test_a_model_saved_today_names_parts_as_the_registry_does(tmp_path: Path) -> None:
    old = saved_model.read_description(HERE / "lora/finished/model.safetensors")
    folder = copied("lora/stopped", tmp_path)
    everfed.resume(folder, progress=False)
    new = saved_model.read_description(folder / "model.safetensors")
    assert old is not None and new is not None
    assert [one["part"] for one in old.adapted] == ["everfed.parts.pretrained.lora:LoRA"]
    assert [one["part"] for one in new.adapted] == ["lora"]
    assert old.recipe == new.recipe  # the digest that ties checkpoints to their recipe


def test_a_user_s_own_part_keeps_its_path() -> None:
    assert registry.name_of(_Own) == f"{__name__}:_Own"


class _Own(registry.part_class("lora")):  # type: ignore[misc]
    """Has the name of a shipped part."""


@pytest.mark.parametrize("name", make.RUNS)
def test_a_recipe_as_it_was_written_is_read_to_the_same_settings(name: str) -> None:
    file = HERE / name / "stopped" / "recipe.toml"
    read, made = everfed.read_recipe(file), everfed.read_recipe(make.recipe(name))
    assert read.model_dump() == made.model_dump()


# every part and policy by the path that it had
PATHS = (HERE / "paths.txt").read_text().split()


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_then_leads_to_the_class_of_today(path: str) -> None:
    found = load_object(path, "method.parts")
    assert issubclass(found, Policy) or registry.part_class(path) is found
    assert found.__module__.startswith("everfed.methods.")
