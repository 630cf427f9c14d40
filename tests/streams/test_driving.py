"""Driving scenes: who is where when, what is stored and replayed, how it is scored, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everfed import api, streams
from everfed.data.detection import WIDTH
from everfed.errors import DataError, UserError
from everfed.streams.options import OptionError

SMALL = {"size": [32, 48], "max_boxes": 6, "max_train": 8, "max_test": 4, "moves_at": 3, "clients": 2, "tasks": 2}


def driving(rounds_per_task: int = 2, scale: float = 1.0, **changes: Any) -> Any:
    table = {"dataset": "streets", "scenario": "driving", **SMALL, **changes}
    return streams.build(table, 0, rounds_per_task, scale=scale)


def test_one_vehicle_moves_and_the_other_stays() -> None:
    stream = driving()
    plans = [stream.round(index) for index in range(stream.rounds)]
    assert [plan.tasks for plan in plans] == [{0: 0, 1: 0}] * 3 + [{0: 0, 1: 1}]
    assert [plan.task for plan in plans] == [0, 0, 0, 1] and [plan.evaluate for plan in plans] == [
        False,
        False,
        True,
        True,
    ]
    assert [plan.begins for plan in plans] == [(0, 1), (), (), (1,)]
    assert [plan.ends for plan in plans] == [(), (), (1,), (0, 1)]
    assert stream.asynchronous and stream.clock_of(1, 3) == (0, 1) and stream.clock_of(0, 3) == (3, 4)


def test_a_vehicle_that_is_too_late_is_named() -> None:
    """One of the two is needed, both are asked."""
    stream = driving(participation=0.5, deadline={"seconds": 1e9, "oversample": 2.0})
    for index in range(stream.rounds):
        plan = stream.round(index)
        assert sorted([*plan.participants, *plan.notes["late"]]) == [0, 1]


def test_hidden_boundaries_are_visible_to_no_part() -> None:
    stream = driving(boundaries=False)
    assert all(not stream.round(i).begins and not stream.round(i).ends for i in range(stream.rounds))
    assert not stream.task_ids


def test_vehicles_share_home_and_the_one_that_moves_has_the_highway() -> None:
    stream = driving()
    home = [stream.data(client, 0) for client in (0, 1)]
    assert sorted(np.concatenate([data.ids for data in home]).tolist()) == list(range(8))
    assert len(stream.data(0, 1)) == 0 and stream.data(1, 1).ids.tolist() == list(range(8, 16))
    assert stream.data(0, 0).y.shape == (4, 6, 5) and stream.input_shape == (3, 32, 48)
    described = stream.describe()
    assert described["samples"] == {"train": [[4, 4], [0, 8]], "test": [4, 4]} and json.dumps(described)


def test_it_knows_where_its_images_come_from() -> None:
    stream = driving()
    for task in (0, 1):
        ids = stream.data(1, task).ids
        assert len(ids) and stream.task_of(1, ids).tolist() == [task] * len(ids)


def test_a_scaled_drive_moves_in_proportion() -> None:
    assert driving(rounds_per_task=35, moves_at=60).moves_at == 60
    assert driving(rounds_per_task=7, moves_at=60, scale=0.2).moves_at == 12


def test_more_boxes_than_there_is_room_for_are_counted_and_the_largest_kept() -> None:
    stream = driving(max_boxes=1)
    whole = driving()
    assert stream.describe()["left_out"]["beyond max_boxes"] > 0
    areas = whole.data(0, 0).y[..., 3:].prod(-1)
    torch.testing.assert_close(stream.data(0, 0).y[:, 0, 3:].prod(-1), areas.max(1).values)


def test_validation_images_come_from_the_training_part() -> None:
    stream = driving(validation=0.25)
    assert len(stream.test(0, "validation")) == 2 and sum(len(stream.data(c, 0)) for c in (0, 1)) == 6
    with pytest.raises(OptionError, match="validation"):
        driving().test(0, "validation")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": 3}, "stream.tasks: driving has 2"),
        ({"moves_at": 4}, "stream.moves_at: 4 is too late"),
        ({"moving": [2]}, "stream.moving"),
        ({"moving": []}, "stream.moving"),
        ({"home": ["village"]}, "stream.home: expected a list of domains of streets: town-day"),
        ({"size": [32]}, "stream.size"),
        ({"anchors": [[0.1]]}, "stream.anchors"),
        ({"anchors": [[0.1, 2.0]]}, "stream.anchors"),
        ({"max_boxes": 0}, "stream.max_boxes"),
        ({"augment": "crop-flip"}, "stream.augment: has no effect"),
        ({"drift": 1, "boundaries": False}, "stream.drift: has no effect"),
        ({"validation": 0.01}, "stream.validation"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        driving(**changes)


def test_a_folder_with_one_domain_needs_the_other_by_name(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pip install 'everfed[images]'")
    image.new("RGB", (48, 32)).save(tmp_path / "0.png")
    table = {"images": [{"id": 0, "file_name": "0.png", "width": 48, "height": 32}], "annotations": []}
    for part in ("train", "test"):
        (tmp_path / f"{part}.json").write_text(json.dumps({**table, "categories": [{"id": 0, "name": "car"}]}))
    with pytest.raises(OptionError, match=r"stream.home: expected one or more domains of .*: all"):
        driving(dataset=str(tmp_path))
    # images without a single box: they train, and nothing is scored
    stream = driving(dataset=str(tmp_path), home=["all"], away=["all"])
    outputs = torch.zeros(1, 5, 6, 2, 3)
    assert torch.isfinite(stream.loss(outputs, stream.test(0).y))
    assert stream.measure_all([outputs], stream.test(0).y).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(DataError, match="not found"):
        driving(dataset="nowhere")


def recipe(method: str, **stream: Any) -> dict[str, Any]:
    return {
        "name": "drive",
        "stream": {"dataset": "streets", "scenario": "driving", "boundaries": False, **SMALL, **stream},
        "model": {"kind": "micro-yolo"},
        "train": {"rounds_per_task": 2, "batch_size": 4, "optimizer": {"kind": "sgd", "lr": 0.01}},
        "eval": {"every": 1},
        "method": {"name": method},
        "engine": {"kind": "eager"},
    }


@pytest.mark.parametrize("method", ["fedavg", "er", "fedgp+der", "agem", "ideal"])
def test_methods_run_and_are_scored_by_precision(method: str, tmp_path: Path) -> None:
    result = api.run(recipe(method), out=tmp_path / method).data
    assert result["score"] == "map" and len(result["accuracy_matrix"]) == 2
    assert [len(entry["accuracy"]) for entry in result["curves"]] == [1, 1, 1, 2]
    further = result["by_score"]["map_50_95"]["accuracy_matrix"]
    for row, finer in zip(result["accuracy_matrix"], further, strict=True):
        for coarse, fine in zip(row, finer, strict=True):
            assert (coarse is None) == (fine is None) and (coarse is None or 0 <= fine <= coarse <= 1)


def test_memories_keep_images_with_their_boxes_and_raw_outputs(tmp_path: Path) -> None:
    from everfed.core.context import Place
    from everfed.recipe import Recipe
    from everfed.session import assemble

    run = assemble(Recipe.model_validate(recipe("fedgp+der")))
    assert run.setup.facts.outputs == (5, 10, 2, 3)
    from everfed.engines.eager import Eager
    from everfed.store.clients import ClientStore

    store = ClientStore(tmp_path)
    engine = Eager(run.setup, store, run.build_module)
    phase = run.method.train_phase()
    from everfed.core.message import MODEL

    plan = run.stream.round(0)
    list(engine.exchange(phase, (0, 1), {MODEL: run.first_model()}, Place(0, plan)))
    kept = store.get(1)["memory"]
    data = run.stream.data(1, 0)
    assert kept["host"]["stored"] == len(data) and kept["logits"].shape == (201, 5, 10, 2, 3)
    for row, number in enumerate(kept["host"]["ids"][: len(data)].tolist()):
        (position,) = np.flatnonzero(data.ids == number)
        torch.testing.assert_close(kept["x"][row], data.x[position])
        torch.testing.assert_close(kept["y"][row], data.y[position])
    assert (kept["y"][: len(data), :, WIDTH] > 0).any() and kept["logits"][: len(data)].abs().sum() > 0


def test_engines_agree(tmp_path: Path) -> None:
    one = api.run(recipe("fedgp+der"), out=tmp_path / "eager").data
    table = recipe("fedgp+der")
    table["engine"] = {"kind": "processes", "workers": 2}
    other = api.run(table, out=tmp_path / "processes").data
    assert one["accuracy_matrix"] == other["accuracy_matrix"] and one["curves"] == other["curves"]
    assert (tmp_path / "eager/model.safetensors").read_bytes() == (
        tmp_path / "processes/model.safetensors"
    ).read_bytes()


def test_the_report_shows_samples_with_boxes(tmp_path: Path) -> None:
    from everfed.reports.html import write

    api.run(recipe("fedavg"), out=tmp_path / "run")
    files = sorted(path.name for path in (tmp_path / "run/pictures").iterdir())
    assert files == [f"task{task}-{number}.png" for task in (1, 2) for number in (1, 2, 3, 4)]
    image = pytest.importorskip("PIL.Image", reason="pip install 'everfed[images]'")
    with image.open(tmp_path / "run/pictures/task1-1.png") as picture:
        shown = np.asarray(picture)
    assert shown.shape == (64, 96, 3) and (shown == 255).all(-1).any()  # a white box, at twice the size
    write([tmp_path / "run"], tmp_path / "report", figures=False)
    assert (tmp_path / "report/report.html").read_text().count("data:image/png;base64,") == 8


def test_a_model_that_is_no_detector_is_refused_before_the_run(tmp_path: Path) -> None:
    table = {
        "stream": {"dataset": "streets", "scenario": "driving", **SMALL},
        "model": {"kind": "mlp"},
        "train": {"rounds_per_task": 2},
        "method": {"name": "fedavg"},
    }
    message = r"model.kind = 'mlp' does not fit 'streets-driving'.*: a detector must give \(n, 5, 10, rows, columns\)"
    with pytest.raises(UserError, match=message):
        api.run(table, tmp_path / "run")
