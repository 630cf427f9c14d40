"""Detection on a GPU: the loss is the CPU's, and captured steps train the same detector as eager ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from everfed import api
from everfed.data.detection import YoloLoss
from tests.streams.test_driving import recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_loss_and_its_gradient_are_the_cpus() -> None:
    draw = torch.Generator().manual_seed(0)
    loss = YoloLoss(torch.tensor([[0.1, 0.1], [0.5, 0.25]]), 3)
    outputs = torch.randn(4, 2, 8, 6, 10, generator=draw)
    y = torch.rand(4, 5, 5, generator=draw)
    y[..., 0], y[0, 2:] = 1.0, 0.0
    found = []
    for device in ("cpu", "cuda"):
        own = outputs.detach().to(device).requires_grad_()
        value = loss(own, y.to(device))
        value.backward()
        found.append((value.detach().cpu(), own.grad.cpu()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_captured_steps_train_the_same_detector(tmp_path: Path) -> None:
    models = []
    for kind in ("eager", "graphs"):
        table = recipe("fedgp+der")
        table["engine"] = {"kind": kind, "device": "cuda", "precision": "fp32"}
        api.run(table, out=tmp_path / kind)
        models.append(load_file(tmp_path / kind / "model.safetensors"))
    eager, graphs = (torch.cat([t.flatten().double() for t in model.values()]) for model in models)
    assert float((eager - graphs).norm() / eager.norm()) < 1e-3
