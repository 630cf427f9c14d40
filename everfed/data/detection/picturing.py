"""Pictures of what a detector found: its boxes in their class's colour, the true ones in white."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from everfed.data.detection.scoring import found_in, truth_of

SHOWN = 0.3  # scores from here on are drawn
LARGER = 2  # pictures are shown at so many times their size
COLOURS = ((230, 60, 60), (60, 190, 75), (255, 200, 25), (70, 130, 240), (240, 90, 230), (70, 240, 240), (245, 130, 48))
_WHITE = (255, 255, 255)


def pictures(x: Tensor, y: Tensor, outputs: Tensor, anchors: Tensor) -> list[np.ndarray]:
    """(h, w, 3) uint8 each, enlarged."""
    found, truth = found_in(outputs, anchors), truth_of(y)
    drawn = []
    for image, seen, real in zip(x.cpu().numpy(), found, truth, strict=True):
        canvas = image.transpose(1, 2, 0).repeat(LARGER, axis=0).repeat(LARGER, axis=1)
        for box in real.boxes:
            frame(canvas, box, _WHITE)
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
