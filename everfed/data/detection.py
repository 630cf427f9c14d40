"""Object detection: boxes, what a YOLO's outputs mean, its loss, and pictures of what it found.

Boxes are rows (class, centre x, centre y, width, height) in shares of the image, padded with zeros to a fixed number;
a row without width is padding. So a target is a tensor of fixed shape, and memories, replay and DER take it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

# boxes ----------------------------------------------------------------------------------------------------------------

LABEL, CX, CY, WIDTH, HEIGHT = range(5)
FIELDS = 5


def corners(boxes: Tensor) -> Tensor:
    """(..., 4) x0, y0, x1, y1 from (..., 4) centre x, centre y, width, height."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def from_corners(labels: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """(n, 5) rows."""
    centre, size = (corner[:, :2] + corner[:, 2:]) / 2, corner[:, 2:] - corner[:, :2]
    return np.concatenate([labels[:, None], centre, size], axis=1).astype(np.float32)


def padded(rows: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """((most, 5), boxes left out): the largest boxes first, zeros after them."""
    order = np.argsort(-rows[:, WIDTH] * rows[:, HEIGHT], kind="stable")[:most]
    kept = np.zeros((most, FIELDS), dtype=np.float32)
    kept[: len(order)] = rows[order]
    return kept, len(rows) - len(order)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """(..., n, m) intersection over union of corners (..., n, 4) and (..., m, 4); 0 where neither has an area."""
    low = torch.maximum(a[..., :, None, :2], b[..., None, :, :2])
    high = torch.minimum(a[..., :, None, 2:], b[..., None, :, 2:])
    inside = (high - low).clamp_min(0.0).prod(-1)
    area = (a[..., 2:] - a[..., :2]).prod(-1)[..., :, None] + (b[..., 2:] - b[..., :2]).prod(-1)[..., None, :]
    return inside / (area - inside).clamp_min(1e-9)


# outputs --------------------------------------------------------------------------------------------------------------
# (n, anchors, 5 + classes, rows, columns): offsets x and y, sizes w and h, objectness, class logits, all raw. A box
# lies at ((sigmoid(x) + column) / columns, (sigmoid(y) + row) / rows) with size anchor * exp(w, h).

MOST = 100  # detections of an image that are kept, and candidates that are looked at
LEAST_SCORE = 0.005
NMS_OVERLAP = 0.5
_LARGEST_EXPONENT = 6.0


def decode(outputs: Tensor, anchors: Tensor) -> Tensor:
    """(n, K, 4) centre x, centre y, width, height in shares of the image, K = anchors * rows * columns."""
    rows, columns = outputs.shape[-2:]
    column = torch.arange(columns, device=outputs.device, dtype=outputs.dtype)
    row = torch.arange(rows, device=outputs.device, dtype=outputs.dtype)
    x = (outputs[:, :, 0].sigmoid() + column) / columns
    y = (outputs[:, :, 1].sigmoid() + row[:, None]) / rows
    size = outputs[:, :, 2:4].clamp_max(_LARGEST_EXPONENT).exp() * anchors[None, :, :, None, None]
    return torch.stack([x, y, size[:, :, 0], size[:, :, 1]], dim=-1).flatten(1, 3)


def flat(outputs: Tensor) -> Tensor:
    """(n, K, 5 + classes), in the order of `decode`."""
    return outputs.permute(0, 1, 3, 4, 2).flatten(1, 3)


def detections(outputs: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(corners (n, m, 4) within the image, scores (n, m), labels (n, m)), best first; a score of 0 is no detection.

    Objectness times class probability; of boxes of one class that overlap by half or more, the best is kept.
    """
    rows = flat(outputs.float())
    scores, labels = (rows[..., 4:5].sigmoid() * rows[..., 5:].softmax(-1)).max(-1)
    scores, order = scores.topk(min(MOST, scores.shape[1]), dim=1)
    labels = labels.gather(1, order)
    boxes = corners(decode(outputs.float(), anchors)).gather(1, order.unsqueeze(-1).expand(-1, -1, 4)).clamp(0.0, 1.0)
    keep = _best(boxes, labels) & (scores >= LEAST_SCORE)
    return boxes, torch.where(keep, scores, 0.0), labels


def _best(boxes: Tensor, labels: Tensor) -> Tensor:
    """(n, m) bool: non-maximum suppression of boxes that are sorted by score, all images at once."""
    rival = (overlap(boxes, boxes) >= NMS_OVERLAP) & (labels[:, :, None] == labels[:, None, :])
    keep = torch.ones_like(labels, dtype=torch.bool)
    for index in range(boxes.shape[1] - 1):
        later = rival[:, index, index + 1 :] & keep[:, index, None]
        keep[:, index + 1 :] &= ~later
    return keep


# loss -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class YoloLoss:
    """The loss of YOLO v2 (Redmon and Farhadi, 2017): box, objectness and class.

    A box is predicted by the cell that its centre lies in, with the anchor whose shape fits it best. Shapes are static
    and nothing is indexed by data, so that a training step can be captured: assignments are one-hot matrices.

    anchors: (A, 2) widths and heights, shares of the image. The weights are those of the paper's code; a prediction
    that overlaps some box by more than `ignore` is not trained to be background.
    """

    anchors: Tensor
    classes: int
    box: float = 5.0
    background: float = 0.5
    ignore: float = 0.6

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean over images of the sums over their boxes and cells. outputs: (n, A, 5 + classes, rows, columns);
        y: (n, M, 5)."""
        box, objects, background, kind = self.terms(outputs, y)
        return (self.box * box + objects + self.background * background + kind) / len(y)

    def terms(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums over the batch: box, objectness of boxes, objectness elsewhere, class."""
        self._check(outputs)
        outputs, y = outputs.float(), y.float()
        anchors = self._anchors(outputs.device)
        real = (y[..., WIDTH] > 0).float()  # (n, M)
        own, target = self._assigned(y, anchors, *outputs.shape[-2:])
        own = own * real.unsqueeze(-1)
        rows = flat(outputs)
        mine = own @ rows  # (n, M, 5 + classes): what is predicted for every box
        box = self._box(mine, target, y) * real
        objects = functional.softplus(-mine[..., 4]) * real
        kind = functional.cross_entropy(
            mine[..., 5:].flatten(0, 1), y[..., LABEL].long().flatten(), reduction="none"
        ).view_as(real)
        free = self._free(outputs, y, own, anchors, real)
        background = functional.softplus(rows[..., 4]) * free
        return box.sum(), objects.sum(), background.sum(), (kind * real).sum()

    def _anchors(self, device: torch.device) -> Tensor:
        """Filled in on the device: a copy from the host would break a capture."""
        if device.type == "cpu":
            return self.anchors
        values = [torch.full((), value, device=device) for value in self.anchors.flatten().tolist()]
        return torch.stack(values).view_as(self.anchors)

    def _check(self, outputs: Tensor) -> None:
        wanted = (len(self.anchors), 5 + self.classes)
        if outputs.dim() != 5 or tuple(outputs.shape[1:3]) != wanted:
            raise ValueError(
                f"a detector must give (n, {wanted[0]}, {wanted[1]}, rows, columns); got {tuple(outputs.shape)}"
            )

    def _assigned(self, y: Tensor, anchors: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """(one-hot (n, M, K) over anchors and cells, targets (n, M, 4): offsets in the cell, log sizes)."""
        at_x, at_y = y[..., CX] * columns, y[..., CY] * rows
        column, row = at_x.floor().clamp(0, columns - 1), at_y.floor().clamp(0, rows - 1)
        size = torch.stack([y[..., WIDTH], y[..., HEIGHT]], dim=-1).clamp_min(1e-6)
        shared = torch.minimum(size.unsqueeze(-2), anchors).prod(-1)
        fit = shared / (size.prod(-1, keepdim=True) + anchors.prod(-1) - shared)  # (n, M, A), both at one centre
        anchor = _one_hot(fit.argmax(-1), len(anchors))
        cell = _one_hot((row * columns + column).long(), rows * columns)
        own = (anchor.unsqueeze(-1) * cell.unsqueeze(-2)).flatten(-2)
        logs = (size.unsqueeze(-2) / anchors).log()
        offsets = torch.stack([at_x - column, at_y - row], dim=-1)
        return own, torch.cat([offsets, (logs * anchor.unsqueeze(-1)).sum(-2)], dim=-1)

    @staticmethod
    def _box(mine: Tensor, target: Tensor, y: Tensor) -> Tensor:
        """(n, M) squared errors of offsets and log sizes; small boxes weigh up to twice as much."""
        offsets = (mine[..., :2].sigmoid() - target[..., :2]).square().sum(-1)
        sizes = (mine[..., 2:4] - target[..., 2:4]).square().sum(-1)
        return (2.0 - y[..., WIDTH] * y[..., HEIGHT]) * (offsets + 0.2 * sizes)

    def _free(self, outputs: Tensor, y: Tensor, own: Tensor, anchors: Tensor, real: Tensor) -> Tensor:
        """(n, K): 1 where a prediction should say that there is nothing."""
        with torch.no_grad():
            near = overlap(corners(decode(outputs, anchors)), corners(y[..., CX:])) * real.unsqueeze(1)
            return (1.0 - own.amax(1)) * (near.amax(-1) <= self.ignore).float()


def _one_hot(index: Tensor, size: int) -> Tensor:
    """(..., size), 1.0 at the index; by comparison, which neither scatters nor looks at the values on the host."""
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).float()


# what was found -------------------------------------------------------------------------------------------------------


class Detected(NamedTuple):
    """The detections in one image: boxes (n, 4) as x0, y0, x1, y1, scores (n,), labels (n,)."""

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray


class Truth(NamedTuple):
    """The boxes of one image, (m, 4) as x0, y0, x1, y1, and their labels (m,)."""

    boxes: np.ndarray
    labels: np.ndarray


def found_in(outputs: Tensor, anchors: Tensor) -> list[Detected]:
    """The detections of every image, on the host."""
    boxes, scores, labels = (one.cpu().numpy() for one in detections(outputs, anchors.to(outputs.device)))
    kept = (np.flatnonzero(row > 0) for row in scores)
    return [Detected(boxes[i][rows], scores[i][rows], labels[i][rows]) for i, rows in enumerate(kept)]


def truth_of(y: Tensor) -> list[Truth]:
    """The boxes of every image, without padding."""
    corner, rows = corners(y[..., CX:]).cpu().numpy(), y.cpu().numpy()
    real = rows[..., WIDTH] > 0
    return [Truth(corner[i][real[i]], rows[i][real[i]][:, LABEL].astype(np.int64)) for i in range(len(rows))]


SHOWN = 0.3  # scores from here on are drawn
LARGER = 2  # pictures are shown at so many times their size
WHITE = (255, 255, 255)
COLOURS = ((230, 60, 60), (60, 190, 75), (255, 200, 25), (70, 130, 240), (240, 90, 230), (70, 240, 240), (245, 130, 48))


def pictures(x: Tensor, y: Tensor, outputs: Tensor, anchors: Tensor) -> list[np.ndarray]:
    """(h, w, 3) uint8 each, enlarged."""
    found, truth = found_in(outputs, anchors), truth_of(y)
    drawn = []
    for image, seen, real in zip(x.cpu().numpy(), found, truth, strict=True):
        canvas = image.transpose(1, 2, 0).repeat(LARGER, axis=0).repeat(LARGER, axis=1)
        for box in real.boxes:
            frame(canvas, box, WHITE)
        for box, score, label in zip(seen.boxes, seen.scores, seen.labels, strict=True):
            if score >= SHOWN:
                frame(canvas, box, COLOURS[int(label) % len(COLOURS)])
        drawn.append(canvas)
    return drawn


def frame(canvas: np.ndarray, box: np.ndarray, colour: tuple[int, int, int]) -> None:
    """Draw the outline of a box (x0, y0, x1, y1 in shares of the image), one pixel wide, in place."""
    height, width = canvas.shape[:2]
    left, right = (min(width - 1, max(0, round(float(x) * (width - 1)))) for x in box[[0, 2]])
    top, bottom = (min(height - 1, max(0, round(float(y) * (height - 1)))) for y in box[[1, 3]])
    canvas[top, left : right + 1] = canvas[bottom, left : right + 1] = colour
    canvas[top : bottom + 1, left] = canvas[top : bottom + 1, right] = colour


# mean average precision ----------------------------------------------------------------------------------------------
# As COCO defines it: precision at 101 recalls, the mean over classes, 100 detections an image. mAP@0.5 counts a
# detection that overlaps a box by half; mAP@[.5:.95] is the mean over ten overlaps. Evaluators at hand (torchmetrics,
# pycocotools) would bring torchvision or a compiler with them; tests hold this one against theirs.
THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(10))
MOST_DETECTIONS = 100
_RECALLS = np.linspace(0.0, 1.0, 101)


class Precision(NamedTuple):
    """map_50: at an overlap of half. map: over all overlaps. None where no image has a box."""

    map_50: float | None
    map: float | None


def precision(outputs: Iterable[Tensor], y: Tensor, anchors: Tensor) -> Precision:
    """mAP over the whole set; outputs come in pieces, in the order of y."""
    found = [one for piece in outputs for one in found_in(piece, anchors)]
    return mean_average_precision(found, truth_of(y))


def mean_average_precision(found: Sequence[Detected], truth: Sequence[Truth]) -> Precision:
    """Over all images; classes without a box count for nothing."""
    if len(found) != len(truth):
        raise ValueError(f"detections of {len(found)} images but boxes of {len(truth)}")
    classes = sorted({int(label) for image in truth for label in image.labels})
    if not classes:
        return Precision(None, None)
    by_class = np.array([_average_precisions(found, truth, label) for label in classes])  # (classes, overlaps)
    return Precision(float(by_class[:, 0].mean()), float(by_class.mean()))


def _average_precisions(found: Sequence[Detected], truth: Sequence[Truth], label: int) -> np.ndarray:
    """(overlaps,) of one class."""
    scores, hits, boxes = [], [], 0
    for seen, real in zip(found, truth, strict=True):
        own = np.flatnonzero(seen.labels == label)
        own = own[np.argsort(-seen.scores[own], kind="stable")][:MOST_DETECTIONS]
        wanted = real.boxes[real.labels == label]
        scores.append(seen.scores[own])
        boxed = (torch.from_numpy(rows.astype(np.float64)) for rows in (seen.boxes[own], wanted))
        hits.append(_matched(overlap(*boxed).numpy()))
        boxes += len(wanted)
    order = np.argsort(-np.concatenate(scores), kind="stable")
    hit = np.concatenate(hits, axis=1)[:, order]  # (overlaps, detections)
    return np.array([_area(row, boxes) for row in hit])


def _matched(overlap: np.ndarray) -> np.ndarray:
    """(overlaps, n) bool: does the detection, best first, get a box that none before it has?"""
    detections, boxes = overlap.shape
    hit = np.zeros((len(THRESHOLDS), detections), dtype=bool)
    for row, threshold in enumerate(THRESHOLDS):
        free = np.ones(boxes, dtype=bool)
        for detection in range(detections if boxes else 0):
            open_to_it = np.where(free, overlap[detection], -1.0)
            best = boxes - 1 - int(open_to_it[::-1].argmax())  # of equal ones the last, as COCO's evaluator does
            if open_to_it[best] >= min(threshold, 1 - 1e-10):
                hit[row, detection], free[best] = True, False
    return hit


def _area(hit: np.ndarray, boxes: int) -> float:
    """Mean precision at 101 recalls, each the best at that recall or beyond."""
    if not len(hit):
        return 0.0
    true = hit.cumsum()
    recall, precision = true / boxes, true / np.arange(1, len(hit) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.searchsorted(recall, _RECALLS, side="left")
    return float(np.where(at < len(best), best[np.minimum(at, len(best) - 1)], 0.0).mean())
