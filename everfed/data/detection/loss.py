"""The loss of YOLO v2 (Redmon and Farhadi, 2017): box, objectness and class.

Every box is the business of the cell its centre lies in and of the anchor whose shape fits it best. Shapes are static
and nothing is indexed by data, so that a training step can be captured: assignments are one-hot matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from everfed.data.detection.boxes import CX, CY, HEIGHT, LABEL, WIDTH, corners, overlap
from everfed.data.detection.decoding import decode, flat


@dataclass(frozen=True)
class YoloLoss:
    """anchors: (A, 2) widths and heights, shares of the image. The weights are those of the paper's code; a prediction
    that overlaps some box by more than `ignore` is not trained to be background."""

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
