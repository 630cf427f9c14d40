"""Gradients of single samples on a GPU: closed forms are taken, and are those of `torch.func`."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from everfed.methods.common.per_sample import Layers, Network, closed_forms
from everfed.methods.regularise.fisher import squared_gradients
from everfed.methods.replay import sample_gradients as selection
from everfed.models.resnet import ResNet18

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def network() -> Network:
    torch.manual_seed(0)
    module = ResNet18((3, 32, 32), 10).cuda().to(memory_format=torch.channels_last)
    module.train()(torch.randn(64, 3, 32, 32, device="cuda"))  # running statistics of something
    params = {name: p.detach() for name, p in module.named_parameters()}
    return Network(module.eval(), params, dict(module.named_buffers()), functional.cross_entropy)


@pytest.mark.parametrize(("tf32", "near"), [(False, 1e-3), (True, 0.03)])
def test_closed_forms_of_resnet18_are_taken_and_right(tf32: bool, near: float) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        net = network()
        x, y = torch.randn(20, 3, 32, 32, device="cuda"), torch.randint(0, 10, (20,), device="cuda")
        assert closed_forms(net, x, y) is not None
        found = squared_gradients(net, x, y, 1 << 30)
        for name, each in net.gradients(x, y).items():
            expected = each.square().sum(0)
            assert (found[name] - expected).norm() <= near * expected.norm(), name
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_selection_takes_closed_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    gradients = Layers.gradients
    monkeypatch.setattr(Layers, "gradients", lambda self, x, y: taken.append(len(x)) or gradients(self, x, y))
    net = network()
    x, y = torch.randn(12, 3, 32, 32, device="cuda"), torch.randint(0, 10, (12,), device="cuda")
    rows = selection.sample_gradients(net, x, y, memory=4 << 30)
    each = net.gradients(x, y)
    expected = torch.cat([each[name].reshape(12, -1) for name in net.params], dim=1)
    assert (rows - expected).norm() <= 0.01 * expected.norm() and 12 in taken
    norms = selection.sample_gradient_norms(net, x, y, memory=4 << 30)
    assert torch.allclose(norms, expected.norm(dim=1), rtol=0.01)
