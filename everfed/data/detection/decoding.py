"""From a YOLO's outputs to boxes.

outputs: (n, anchors, 5 + classes, rows, columns): offsets x and y, sizes w and h, objectness, class logits, all raw.
A box lies at ((sigmoid(x) + column) / columns, (sigmoid(y) + row) / rows) with size anchor * exp(w, h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from everfed.data.detection.boxes import corners, overlap

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
