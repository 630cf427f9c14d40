"""Prototypes sent as gradients (GLFC, Dong et al., 2022): encoding on a client, reconstruction on the proxy server.

A client perturbs the image nearest to its class mean and sends the gradient of a small, fixed, random network on it.
The server, which has that network too, reads the label off the gradient and searches an image with the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from everfed.core.trainer import Trainer
from everfed.method import Layout, Model
from everfed.methods.common.layers import class_means, features

Weights = dict[str, Tensor]  # of the encoder, by name


# on the client -------------------------------------------------------------------------------------------------------
def nearest_to_mean(trainer: Trainer, model: Model, x: Tensor, y: Tensor) -> Tensor:
    """(k,) for every class present, ascending: the position of the sample nearest to its class's mean feature, all
    features scaled to length 1."""
    found, y = functional.normalize(features(trainer, model, x)), y.to(trainer.device)
    means = class_means(found, y, trainer.stream.classes)
    distance = (found - means[y]).square().sum(1)
    present = torch.unique(y)
    return torch.stack([torch.where(y == label, distance, torch.inf).argmin() for label in present])


def perturbed(
    trainer: Trainer, model: Model, inputs: Tensor, y: Tensor, classes: Tensor, steps: int, lr: float
) -> Tensor:
    """Network inputs after gradient steps that lower the model's loss for their labels: mean binary cross-entropy of
    each sample over the outputs `classes`. The model stays as it is."""
    trainer.replica.load(model)
    module = trainer.replica.module.eval()
    targets = functional.one_hot(y, trainer.stream.classes).float().index_select(1, classes)
    x = inputs.detach().clone()
    for _ in range(steps):
        x.requires_grad_(True)
        outputs = module(x).index_select(1, classes)
        loss = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1).sum()
        x = (x - lr * torch.autograd.grad(loss, x)[0]).detach()
    return x


def encoded(encoder: nn.Module, weights: Weights, x: Tensor, y: Tensor, differentiable: bool = False) -> Tensor:
    """(E,) gradient of the cross-entropy of one sample with respect to the encoder's weights, in their order."""
    weights = {name: tensor.detach().requires_grad_(True) for name, tensor in weights.items()}
    outputs = functional_call(encoder, weights, (x.unsqueeze(0),))
    loss = functional.cross_entropy(outputs, y.reshape(1))
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=differentiable)
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


# on the proxy server -------------------------------------------------------------------------------------------------
def label_of(gradient: Tensor, layout: Layout, head: str = "head.weight") -> Tensor:
    """The label of the sample that a gradient comes from. Of the last layer's rows only the label's own has a negative
    sum: row c is (p_c - [c = label]) h, and h, a sigmoid's output, is positive."""
    return layout.param(head).view(gradient).sum(1).argmin()


def reconstructed(
    gradient_of: Callable[[Tensor], Tensor], target: Tensor, start: Tensor, steps: int, lr: float, keep: int
) -> tuple[Tensor, list[float]]:
    """(iterates (k, ...) with k <= keep, their losses): the last of the images, from `start` on, that L-BFGS on
    || gradient_of(x) - target ||^2 reached with a lower loss than all before it."""
    x = start.detach().clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([x], lr=lr)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (gradient_of(x) - target).square().sum()
        x.grad = torch.autograd.grad(loss, x)[0]
        return loss

    accepted, losses = [x.detach().clone()], [float(closure().detach())]
    for _ in range(steps):
        optimizer.step(closure)
        loss = float(closure().detach())
        if not loss < losses[-1]:
            if loss != loss:  # NaN: the search cannot go on
                break
            continue
        accepted.append(x.detach().clone())
        losses.append(loss)
    return torch.stack(accepted[-keep:]), losses


# the network whose gradients encode a prototype: a LeNet with sigmoids, as in gradient inversion ---------------------
@dataclass(frozen=True)
class EncoderBlueprint:
    """shape: (channels, side, side) of the images."""

    shape: tuple[int, ...]
    classes: int

    def build(self) -> nn.Module:
        return GradientEncoder(self.shape, self.classes)


class GradientEncoder(nn.Module):
    """Three 5x5 convolutions with 12 channels, strides 2, 2 and 1, a linear layer; all weights uniform in [-0.5, 0.5].

    85,036 parameters on 3 x 32 x 32 images with 100 classes; the linear layer is fed with 588 numbers at 28 pixels, 768
    at 32 and 3,072 at 64. Sigmoids, because the gradient is differentiated once more to find the image again.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        if len(shape) != 3 or shape[1] != shape[2]:
            raise ValueError(f"gradients of prototypes need square images (channels, side, side); got {shape}")
        strides = (2, 2, 1)
        side = shape[1]
        self.convs = nn.ModuleList(
            nn.Conv2d(shape[0] if i == 0 else 12, 12, 5, stride, padding=2) for i, stride in enumerate(strides)
        )
        for stride in strides:
            side = (side - 1) // stride + 1
        self.head = nn.Linear(12 * side**2, classes)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.sigmoid(conv(x))
        outputs: Tensor = self.head(x.flatten(1))
        return outputs
