"""Mean average precision as COCO defines it: precision at 101 recalls, the mean over classes, 100 detections an image.

mAP@0.5 counts a detection that overlaps a box by half; mAP@[.5:.95] is the mean over ten overlaps. In numpy alone: the
evaluators at hand (torchmetrics, pycocotools) would bring torchvision or a compiler with them; tests hold this one
against theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from everfed.data.detection import Detected, Truth, found_in, truth_of

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


def overlaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n, m) intersection over union of boxes (n, 4) and (m, 4); 0 where neither has an area."""
    low, high = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
    inside = np.clip(high - low, 0.0, None).prod(-1)
    areas = (a[:, 2:] - a[:, :2]).prod(-1)[:, None] + (b[:, 2:] - b[:, :2]).prod(-1)[None, :]
    union = areas - inside
    return np.divide(inside, union, out=np.zeros_like(inside), where=union > 0)


def _average_precisions(found: Sequence[Detected], truth: Sequence[Truth], label: int) -> np.ndarray:
    """(overlaps,) of one class."""
    scores, hits, boxes = [], [], 0
    for seen, real in zip(found, truth, strict=True):
        own = np.flatnonzero(seen.labels == label)
        own = own[np.argsort(-seen.scores[own], kind="stable")][:MOST_DETECTIONS]
        wanted = real.boxes[real.labels == label]
        scores.append(seen.scores[own])
        hits.append(_matched(overlaps(seen.boxes[own].astype(np.float64), wanted.astype(np.float64))))
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
