"""Mean average precision against closed forms and against COCO's own evaluator."""

from __future__ import annotations

import contextlib
import io
import math

import numpy as np
import pytest
import torch

from everfed.data.detection import Detected, Truth, mean_average_precision, overlap

BOX = np.array([[0.1, 0.1, 0.3, 0.3]])


def found(boxes, scores, labels) -> Detected:
    return Detected(
        np.array(boxes, dtype=float).reshape(-1, 4), np.array(scores, dtype=float), np.array(labels, dtype=int)
    )


def truth(boxes, labels) -> Truth:
    return Truth(np.array(boxes, dtype=float).reshape(-1, 4), np.array(labels, dtype=int))


def test_overlaps_of_known_boxes() -> None:
    a = np.array([[0, 0, 2, 2], [0, 0, 0, 0]], dtype=float)
    b = np.array([[1, 1, 3, 3], [0, 0, 2, 2], [5, 5, 6, 6], [0, 0, 0, 0]], dtype=float)
    np.testing.assert_allclose(
        overlap(torch.from_numpy(a), torch.from_numpy(b)).numpy(), [[1 / 7, 1, 0, 0], [0, 0, 0, 0]]
    )


def test_the_same_boxes_are_perfect() -> None:
    result = mean_average_precision([found(BOX, [0.3], [2])], [truth(BOX, [2])])
    assert result == (1.0, 1.0)


def test_a_box_of_another_class_or_place_is_worth_nothing() -> None:
    assert mean_average_precision([found(BOX, [0.9], [1])], [truth(BOX, [2])]) == (0.0, 0.0)
    assert mean_average_precision([found(BOX + 0.5, [0.9], [2])], [truth(BOX, [2])]) == (0.0, 0.0)


def test_a_second_detection_of_the_same_box_is_false() -> None:
    """Precision 1 at recalls to 1/2, 2/3 beyond: the third detection finds the other box."""
    boxes = [BOX[0], BOX[0], BOX[0] + 0.5]
    result = mean_average_precision([found(boxes, [0.9, 0.8, 0.7], [0, 0, 0])], [truth([BOX[0], BOX[0] + 0.5], [0, 0])])
    assert result.map_50 == pytest.approx((51 * 1 + 50 * 2 / 3) / 101)


def test_an_overlap_of_seven_tenths_counts_at_five_of_ten_thresholds() -> None:
    shifted = np.array([[0.0, 0.0, 1.0, 0.72]])
    result = mean_average_precision([found(shifted, [1.0], [0])], [truth([[0, 0, 1, 1]], [0])])
    assert (result.map_50, result.map) == (1.0, pytest.approx(0.5))


def test_images_without_boxes() -> None:
    assert mean_average_precision([found([], [], [])], [truth([], [])]) == (None, None)
    assert mean_average_precision([], []) == (None, None)
    empty, full = truth([], []), truth(BOX, [0])
    assert mean_average_precision([found([], [], []), found(BOX, [0.5], [0])], [empty, full]) == (1.0, 1.0)
    # a false alarm in an empty image with a higher score halves the precision
    alarmed = mean_average_precision([found(BOX, [0.9], [0]), found(BOX, [0.5], [0])], [empty, full])
    assert alarmed == (0.5, 0.5)


@pytest.mark.parametrize(("missed", "score"), [(99, 0.01), (100, 0.0)])
def test_a_hundred_detections_of_an_image_count(missed: int, score: float) -> None:
    """The least certain one is right: precision 1 / 100 where it is the hundredth, and left out behind that."""
    seen = found([*[BOX[0] + 0.5] * missed, BOX[0]], np.linspace(0.9, 0.1, missed + 1), [0] * (missed + 1))
    assert mean_average_precision([seen], [truth(BOX, [0])]).map_50 == pytest.approx(score)


def test_as_many_images_on_both_sides() -> None:
    with pytest.raises(ValueError, match="1 images but boxes of 2"):
        mean_average_precision([found([], [], [])], [truth([], [])] * 2)


def drawn(seed: int, images: int = 12, classes: int = 3) -> tuple[list[Detected], list[Truth]]:
    """Boxes, and detections that are near some of them, doubled, of the wrong class, or nowhere."""
    rng = np.random.default_rng(seed)
    seen, real = [], []
    for _ in range(images):
        corner = rng.uniform(0, 0.7, (rng.integers(0, 6), 2))
        boxes = np.concatenate([corner, corner + rng.uniform(0.12, 0.3, corner.shape)], axis=1)
        labels = rng.integers(0, classes, len(boxes))
        near = boxes + rng.normal(0, 0.02, boxes.shape)
        corner = rng.uniform(0, 0.7, (4, 2))
        stray = np.concatenate([corner, corner + 0.2], axis=1)
        everything = np.concatenate([near, near[: len(near) // 2] + 0.01, stray])
        guesses = np.concatenate([labels, labels[: len(near) // 2], rng.integers(0, classes, 4)])
        seen.append(Detected(everything, rng.uniform(0.01, 1, len(everything)), guesses))
        real.append(Truth(boxes, labels))
    return seen, real


def by_coco(seen: list[Detected], real: list[Truth]) -> tuple[float, float]:
    """What pycocotools says, the evaluator behind torchmetrics."""
    modules = ("pycocotools.coco", "pycocotools.cocoeval")
    coco, evaluation = (pytest.importorskip(name, reason="pip install 'everfed[detection]'") for name in modules)
    wide = lambda box: [*map(float, box[:2]), *map(float, box[2:] - box[:2])]  # noqa: E731
    with contextlib.redirect_stdout(io.StringIO()):
        annotations = [
            {"image_id": i, "category_id": int(c), "bbox": wide(b), "area": float(np.prod(b[2:] - b[:2])), "iscrowd": 0}
            for i, image in enumerate(real)
            for b, c in zip(image.boxes, image.labels, strict=True)
        ]
        truth_table = coco.COCO()
        truth_table.dataset = {
            "images": [{"id": i} for i in range(len(real))],
            "annotations": [{"id": n, **one} for n, one in enumerate(annotations, start=1)],
            "categories": [{"id": int(c)} for c in {one["category_id"] for one in annotations}],
        }
        truth_table.createIndex()
        said = truth_table.loadRes(
            [
                {"image_id": i, "category_id": int(c), "bbox": wide(b), "score": float(s)}
                for i, image in enumerate(seen)
                for b, s, c in zip(image.boxes, image.scores, image.labels, strict=True)
            ]
        )
        judge = evaluation.COCOeval(truth_table, said, "bbox")
        judge.params.areaRng, judge.params.areaRngLbl = [[0, 1e10]], ["all"]
        judge.evaluate()
        judge.accumulate()
    precision = judge.eval["precision"][:, :, :, 0, -1]  # thresholds, recalls, classes
    return float(precision[0].mean()), float(precision.mean())


@pytest.mark.parametrize("seed", range(8))
def test_equals_cocos_own_evaluator(seed: int) -> None:
    seen, real = drawn(seed)
    ours = mean_average_precision(seen, real)
    theirs = by_coco(seen, real)
    assert ours.map_50 == pytest.approx(theirs[0], abs=1e-9)
    assert ours.map == pytest.approx(theirs[1], abs=1e-9)
    assert 0 < ours.map < ours.map_50 < 1 and not math.isclose(ours.map, ours.map_50)


def test_equals_torchmetrics_where_it_can_run() -> None:
    pytest.importorskip("torchvision", reason="torchmetrics' MeanAveragePrecision needs torchvision")
    import torch
    from torchmetrics.detection import MeanAveragePrecision

    seen, real = drawn(0)
    metric = MeanAveragePrecision(box_format="xyxy")
    metric.update(
        [{k: torch.from_numpy(v) for k, v in one._asdict().items()} for one in seen],
        [{k: torch.from_numpy(v) for k, v in one._asdict().items()} for one in real],
    )
    said = metric.compute()
    ours = mean_average_precision(seen, real)
    assert (ours.map_50, ours.map) == pytest.approx((said["map_50"].item(), said["map"].item()), abs=1e-6)
