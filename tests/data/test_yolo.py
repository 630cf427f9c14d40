"""The detector: what its outputs mean, its loss, its detections, and that it learns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from everfed import models
from everfed.data.detection import (
    YoloLoss,
    _best,
    corners,
    decode,
    detections,
    overlap,
    pictures,
    precision,
    truth_of,
)

ANCHORS = torch.tensor([[0.1, 0.1], [0.5, 0.25]])
CLASSES = 3


def quiet(n: int = 1, rows: int = 4, columns: int = 6) -> Tensor:
    """Outputs that find nothing."""
    outputs = torch.zeros(n, len(ANCHORS), 5 + CLASSES, rows, columns)
    outputs[:, :, 4] = -20.0
    return outputs


def saying(outputs: Tensor, anchor: int, row: int, column: int, label: int, score: float = 20.0) -> Tensor:
    outputs[0, anchor, 4, row, column] = score
    outputs[0, anchor, 5 + label, row, column] = 20.0
    return outputs


def boxes(*rows: tuple[float, ...], most: int = 4) -> Tensor:
    y = torch.zeros(1, most, 5)
    for index, row in enumerate(rows):
        y[0, index] = torch.tensor(row)
    return y


def test_raw_zeros_are_the_anchor_in_the_middle_of_its_cell() -> None:
    decoded = decode(torch.zeros(1, 2, 8, 4, 6), ANCHORS)
    assert decoded.shape == (1, 48, 4)
    torch.testing.assert_close(decoded[0, 0], torch.tensor([0.5 / 6, 0.5 / 4, 0.1, 0.1]))
    torch.testing.assert_close(decoded[0, 24 + 2 * 6 + 3], torch.tensor([3.5 / 6, 2.5 / 4, 0.5, 0.25]))


def test_a_detection_is_where_its_cell_says() -> None:
    found, scores, labels = detections(saying(quiet(), 1, 2, 3, label=2), ANCHORS)
    assert (scores > 0).sum() == 1 and labels[0, 0] == 2 and scores[0, 0] > 0.99
    torch.testing.assert_close(found[0, 0], corners(torch.tensor([3.5 / 6, 2.5 / 4, 0.5, 0.25])))


def test_of_overlapping_boxes_of_one_class_the_best_is_kept() -> None:
    for label, kept in ((2, 1), (1, 2)):
        outputs = saying(saying(quiet(), 1, 2, 3, 2), 1, 2, 2, label, score=1.0)
        outputs[0, 1, 0, 2, 2] = 20.0  # a neighbour at the edge of its cell: an overlap of 0.71
        assert (detections(outputs, ANCHORS)[1] > 0).sum() == kept


def test_a_box_that_was_left_out_leaves_no_other_out() -> None:
    """Boxes of width 0.6, each 0.15 further right: neighbours overlap by 0.45 / 0.75 = 0.6, the first and the third by
    0.3 / 0.9. The second falls to the first, so that nothing speaks against the third."""
    row = torch.tensor([[left, 0.0, left + 0.6, 1.0] for left in (0.0, 0.15, 0.3)])
    labels = torch.zeros(1, 3, dtype=torch.long)
    assert _best(row[None], labels).tolist() == [[True, False, True]]
    assert _best(row[None], torch.tensor([[0, 1, 0]])).tolist() == [[True, True, True]]


def test_boxes_never_leave_the_image() -> None:
    outputs = saying(quiet(), 1, 0, 0, label=0)
    outputs[:, :, 2:4] = 100.0  # exp of it would not be a number
    found = detections(outputs, ANCHORS)[0]
    assert torch.isfinite(found).all() and found.min() >= 0 and found.max() <= 1


def test_a_perfect_answer_costs_almost_nothing_and_a_wrong_one_its_part() -> None:
    y = boxes((2, 3.5 / 6, 2.5 / 4, 0.5, 0.25))
    loss = YoloLoss(ANCHORS, CLASSES)
    perfect = loss(saying(quiet(), 1, 2, 3, 2), y)
    assert perfect < 1e-5
    terms = loss.terms(saying(quiet(), 1, 2, 3, label=0), y)
    assert terms[3] == pytest.approx(20.0, abs=1e-3) and sum(terms[:3]) < 1e-5  # class alone
    terms = loss.terms(quiet(), y)
    assert terms[1] == pytest.approx(20.0, abs=1e-3)  # nobody says that there is something
    terms = loss.terms(saying(saying(quiet(), 1, 2, 3, 2), 0, 0, 0, 1), y)
    assert terms[2] == pytest.approx(20.0, abs=1e-3)  # and somebody does where there is nothing


def test_the_box_term_by_hand() -> None:
    """Offsets (0.7, 0.2) in the cell, twice the anchor's width: (0.2^2 + 0.3^2 + 0.2 ln(2)^2) (2 - w h)."""
    y = boxes((0, 1.7 / 6, 1.2 / 4, 0.2, 0.1))
    term = YoloLoss(ANCHORS, CLASSES).terms(quiet(), y)[0]
    assert term == pytest.approx((0.04 + 0.09 + 0.2 * 0.6931472**2) * (2 - 0.02), rel=1e-5)


def test_predictions_that_overlap_a_box_well_are_not_called_background() -> None:
    """The neighbour's box, moved over: an overlap of more than 0.6, so its objectness costs nothing."""
    outputs = saying(quiet(), 1, 2, 3, 2)
    outputs[0, 1, 0, 2, 2], outputs[0, 1, 4, 2, 2] = 20.0, 20.0  # at the right edge of the cell before
    y = boxes((2, 3.1 / 6, 2.5 / 4, 0.5, 0.25))
    assert YoloLoss(ANCHORS, CLASSES).terms(outputs, y)[2] < 1e-5


def test_padding_and_empty_images_cost_only_background() -> None:
    loss = YoloLoss(ANCHORS, CLASSES)
    outputs = torch.randn(2, 2, 8, 4, 6, generator=torch.Generator().manual_seed(0))
    box, objects, background, kind = loss.terms(outputs, torch.zeros(2, 4, 5))
    assert (box, objects, kind) == (0, 0, 0)
    assert background == pytest.approx(functional.softplus(outputs[:, :, 4]).sum().item(), rel=1e-5)
    one = boxes((1, 0.5, 0.5, 0.2, 0.2), most=1)
    assert loss(outputs[:1], one) == pytest.approx(loss(outputs[:1], boxes((1, 0.5, 0.5, 0.2, 0.2), most=9)).item())


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 2, *[st.floats(0.01, 1)] * 2), min_size=1, max_size=5))
def test_every_loss_and_gradient_is_finite(rows: list[tuple[float, ...]]) -> None:
    outputs = torch.randn(1, 2, 8, 4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = YoloLoss(ANCHORS, CLASSES)(outputs, boxes(*((1, *row) for row in rows), most=5))
    loss.backward()
    assert torch.isfinite(loss) and loss > 0 and torch.isfinite(outputs.grad).all()


def test_outputs_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must give \(n, 2, 8, rows, columns\)"):
        YoloLoss(ANCHORS, CLASSES)(torch.zeros(1, 3, 8, 4, 6), boxes())


def test_overlap_of_known_boxes() -> None:
    a, b = torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 1.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(overlap(a, b), torch.tensor([[1 / 7, 0.0]]))


def test_precision_of_perfect_outputs_is_one() -> None:
    y = boxes((2, 3.5 / 6, 2.5 / 4, 0.5, 0.25))
    assert precision([saying(quiet(), 1, 2, 3, 2)], y, ANCHORS) == (1.0, 1.0)
    assert precision([quiet()], torch.zeros(1, 4, 5), ANCHORS) == (None, None)
    assert len(truth_of(y)[0].labels) == 1


def test_pictures_show_what_is_there_and_what_was_found() -> None:
    x, y = torch.zeros(1, 3, 20, 30, dtype=torch.uint8), boxes((2, 0.5, 0.5, 0.6, 0.6))
    (plain,) = pictures(x, y, quiet(), ANCHORS)
    assert plain.shape == (40, 60, 3) and (plain == 255).all(-1).any()
    (marked,) = pictures(x, y, saying(quiet(), 1, 2, 3, 2), ANCHORS)
    assert len({tuple(pixel) for pixel in marked.reshape(-1, 3)}) == 3


def test_sizes_of_the_networks() -> None:
    tiny = models.build("tiny-yolo", (3, 64, 96), 5, 0)
    assert sum(p.numel() for p in tiny.parameters()) == 11_039_682
    assert tiny.eval()(torch.zeros(1, 3, 64, 96)).shape == (1, 5, 10, 2, 3)
    micro = models.build("micro-yolo", (3, 64, 96), 5, 0, {"anchors": 2})
    assert micro(torch.zeros(2, 3, 64, 96)).shape == (2, 2, 10, 4, 6)
    assert sum(p.numel() for p in models.build("micro-yolo", (3, 64, 96), 5, 0).parameters()) == 64_890


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [((3, 90, 96), {}, "multiples of stride = 32"), ((3, 64, 64), {"stride": 8}, "stride must be one of")],
)
def test_networks_that_do_not_fit_are_refused(shape, options, said) -> None:
    with pytest.raises(models.ModelError, match=said):
        models.build("tiny-yolo", shape, 5, 0, options)


@pytest.mark.slow
def test_ten_images_are_learned_by_heart() -> None:
    from everfed.streams import build

    keys = {"size": [96, 160], "max_boxes": 8, "max_train": 10, "max_test": 2, "moves_at": 1, "tasks": 2, "clients": 1}
    stream = build({"dataset": "streets", "scenario": "driving", "moving": [0], **keys}, 0, 1)
    data = stream.data(0, 0)
    net, x = models.build("micro-yolo", stream.input_shape, stream.classes, 0), stream.inputs(data.x)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(120):
        optimizer.zero_grad()
        stream.loss(net(x), data.y).backward()
        optimizer.step()
    with torch.no_grad():
        found = precision([net.eval()(x)], data.y, stream.anchors)
    assert len(data) == 10 and found.map_50 > 0.9
