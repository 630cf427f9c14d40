"""Boxes of one image as rows of fixed number: (class, centre x, centre y, width, height), shares of the image."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LABEL, CX, CY, WIDTH, HEIGHT = range(5)
FIELDS = 5


def corners(boxes: Tensor) -> Tensor:
    """(..., 4) x0, y0, x1, y1 from (..., 4) centre x, centre y, width, height."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def clipped(corner: np.ndarray) -> np.ndarray:
    """(n, 4) x0, y0, x1, y1 cut off at the image's edges, [0, 1]."""
    return np.clip(corner, 0.0, 1.0)


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
