"""The mean average precision of a detector's outputs on a test set."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from everfed.data.detection.boxes import CX, LABEL, WIDTH, corners
from everfed.data.detection.decoding import detections
from everfed.metrics.detection import Detected, Precision, Truth, mean_average_precision


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


def precision(outputs: Iterable[Tensor], y: Tensor, anchors: Tensor) -> Precision:
    """mAP over the whole set; outputs come in pieces, in the order of y."""
    found = [one for piece in outputs for one in found_in(piece, anchors)]
    return mean_average_precision(found, truth_of(y))
