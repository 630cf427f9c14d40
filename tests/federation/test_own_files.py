"""Recipes of a server that name files outside a client's data folder, code that it did not choose, or the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everfed.federation import request as ask
from everfed.federation.client import Identity, RealClient
from everfed.federation.packet import Packet, digest
from everfed.federation.policy import Guard, Policy
from everfed.federation.request import REFUSED, REPLY, Answer, Request, Step
from everfed.federation.runtime import RuntimeBuilder
from everfed.recipe import to_toml
from tests.federation.field import small_recipe


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(the client's data folder, another folder with a table that is none of the server's business)."""
    inside, outside = tmp_path / "data", tmp_path / "home"
    for folder, name in ((inside, "own.csv"), (outside, "patients.csv")):
        folder.mkdir()
        rows = [f"{value % 7},{value % 5},{value % 2}" for value in range(60)]
        (folder / name).write_text("age,secret_column,label\n" + "\n".join(rows) + "\n")
    np.save(outside / "anchors.npy", np.zeros((2, 4), dtype=np.float32))
    monkeypatch.chdir(outside)
    return inside, outside


def answered(tmp_path: Path, data: Path, *sets: str, own: str | None = None, text: str = "") -> Answer:
    """To the first request of a run whose recipe has these settings."""
    text = (text or to_toml(small_recipe(tmp_path, 2, *sets))).encode()
    site = RealClient(tmp_path / "state", Identity("site-0", 0), RuntimeBuilder(data_dir=str(data), data=own))
    step = Step("evaluate", (0, 0, 0, 0), -1, "", ())
    made = Request("a1", 1, 0, digest(text), 1.0, (0, 0, 0, 0), (step,))
    return Answer.of(Guard(site, Policy(), own, data).answer(Packet(made.header(), {ask.RECIPE: text})))


def opens(answer: Answer) -> bool:
    """Was the recipe assembled? Its step has no message, so that what follows is a reply without values or a failure
    of that step."""
    return answer.kind == REPLY or "step failed" in answer.reason


TABLE = """\
name = "table"

[stream]
dataset = "{}"
scenario = "class-incremental"
tasks = 1
clients = 2
{}

[model]
kind = "mlp"

[method]
name = "fedavg"
"""


@pytest.mark.parametrize(
    "name", ["{outside}/patients.csv", "../home/patients.csv", "patients.csv", "~/../{outside}/patients.csv"]
)
def test_a_table_elsewhere_is_not_opened(name: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Absolute, beside the data folder, and in the folder in which the client was started."""
    inside, outside = folders
    answer = answered(tmp_path, inside, text=TABLE.format(name.format(outside=outside), 'label = "no_such_column"'))
    assert "secret_column" not in answer.reason and "age" not in answer.reason.split()
    assert str(outside) not in answer.reason.replace(name.format(outside=outside), "")
    assert not (tmp_path / "state" / "a1").exists()


def test_a_table_in_the_data_folder_is(folders: tuple[Path, Path], tmp_path: Path) -> None:
    answer = answered(tmp_path, folders[0], text=TABLE.format("own.csv", ""))
    assert opens(answer) and (tmp_path / "state" / "a1" / "recipe.toml").is_file()


@pytest.mark.parametrize("table", [("hub:someone/some", ""), ("own.text.jsonl", 'encoder = "hub:someone/some"')])
def test_nothing_is_loaded_from_the_network(
    table: tuple[str, str], folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f'{{"text": "words {n}", "label": "{"ab"[n % 2]}"}}' for n in range(20)]
    (folders[0] / "own.text.jsonl").write_text("\n".join(lines) + "\n")
    asked: list[Any] = []
    monkeypatch.setattr("everfed.data.hub._asked", lambda *names: asked.append(names))
    monkeypatch.setattr("everfed.data.encoders._transformers", lambda: asked.append("transformers"))
    answer = answered(tmp_path, folders[0], text=TABLE.format(*table))
    assert not asked and answer.kind == REFUSED and "network" in answer.reason


@pytest.mark.parametrize(
    "sets",
    [
        ("model.weights={outside}/w.safetensors",),
        ("model.kind=hf:{outside}/bert",),
        ("stream.trace={outside}/patients.csv",),
    ],
)
def test_weights_networks_and_traces_elsewhere_are_refused_by_name(
    sets: tuple[str, ...], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    answer = answered(tmp_path, folders[0], *(one.format(outside=folders[1]) for one in sets))
    assert answer.kind == REFUSED or answer.reason.startswith("the step failed")
    assert not (tmp_path / "state" / "a1").exists()


RECIPE = """\
name = "own"

[stream]
dataset = "everfed.federation.elsewhere:data"
scenario = "own"
clients = 2
classes = 2
input_shape = [3]

[model]
kind = "clinic_data:wipe"

[method]
name = "fedavg"
"""
OWN = """
def mine(client):
    return []

def wipe(input_shape, classes):
    raise SystemExit("the server ran this")
"""


def test_of_the_module_that_data_names_only_that_function_may_be_called(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folders[0] / "clinic_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(folders[0]))
    answer = answered(tmp_path, folders[0], own="clinic_data:mine", text=RECIPE)
    assert answer.kind == REFUSED and "not allowed here" in answer.reason


@pytest.mark.parametrize(
    "kind", ["everfed.models:build", "everfed.models.pretrained:find", "everfed.store.files:write_atomic"]
)
def test_functions_of_everfed_are_no_networks(kind: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    answer = answered(tmp_path, folders[0], f"model.kind={kind}", "model.hidden=[]")
    assert answer.kind == REFUSED and "NotAllowed" in answer.reason
