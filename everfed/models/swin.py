"""Swin-T (Liu et al., 2021) from transformers, never pretrained; the package is imported only when one is built."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SwinT(nn.Module):
    """Patches of 4, windows of 7, 96 channels, blocks 2-2-6-2: 28,288,354 parameters with 1000 classes.

    Without stochastic depth, which draws from torch's global generator and would make runs irreproducible. Images need
    224 pixels, or the last stage has less than one window.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        if len(input_shape) != 3 or input_shape[1] != input_shape[2] or input_shape[1] % 224:
            raise ValueError(f"swin-t needs square images (channels, side, side) of 224 pixels; got {input_shape}")
        try:
            from transformers import SwinConfig, SwinModel
        except ImportError as missing:
            raise ValueError(
                "swin-t needs the package transformers; install it with: pip install 'everfed[text]'"
            ) from missing
        config = SwinConfig(image_size=input_shape[1], num_channels=input_shape[0], drop_path_rate=0.0)
        self.base = SwinModel(config)
        self.head = nn.Linear(config.hidden_size, classes)
        _keep_constants(self.base)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x).pooler_output)


def _keep_constants(module: nn.Module) -> None:
    """Tables of positions are int64 buffers; as int32 they are constants of the module, not counters to be sent."""
    for layer in module.modules():
        for name, table in layer.named_buffers(recurse=False):
            if table.dtype == torch.int64:
                setattr(layer, name, table.to(torch.int32))
