"""Networks by name, or a user's own as `package.module:Name`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from everfed.core import random
from everfed.errors import SettingError
from everfed.models.acgan import ACGANCNN
from everfed.models.cnn import MLP, McMahanCNN, SmallCNN, TwoConvCNN
from everfed.models.deep_head import ResNet18Deep, SConvNet
from everfed.models.resnet import ResNet18, ResNet18ImageNet
from everfed.models.swin import SwinT
from everfed.models.tinybert import TinyBERT
from everfed.models.yolo import MicroYOLO, TinyYOLO
from everfed.naming import load_object, nearest

AUTO = "auto"
SMALLEST_IMAGE = 16  # pixels a side from which convolutions pay


def automatic(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network that suits the form of the data."""
    square = len(input_shape) == 3 and input_shape[1] == input_shape[2] >= SMALLEST_IMAGE
    return McMahanCNN(input_shape, classes) if square else MLP(input_shape, classes)


MODELS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    AUTO: (automatic, "by the data: mcmahan-cnn for square images of 16 pixels or more, else mlp"),
    "mlp": (MLP, "flatten and hidden ReLU layers; option hidden = [100, 100]"),
    "small-cnn": (SmallCNN, "the 21,840-parameter CNN of FedGP's code; option dropout = 0.5"),
    "mcmahan-cnn": (McMahanCNN, "the 1,663,370-parameter CNN of the FedAvg paper"),
    "two-conv-cnn": (TwoConvCNN, "the two-convolution CNN of STAMP's code, 924,708 parameters on CIFAR-100"),
    "swin-t": (SwinT, "Swin-T from random weights; needs the package transformers"),
    "tinybert": (TinyBERT, "TinyBERT for masked language modelling, 4 layers of 312; option dropout = 0.1"),
    "tiny-yolo": (TinyYOLO, "the v2-tiny detector, 11 M parameters; options stride = 32, anchors = 5"),
    "micro-yolo": (MicroYOLO, "a small detector for CPUs, 64,890 parameters with 5 classes; option anchors = 5"),
    "s-convnet": (SConvNet, "AF-FCL's small network, 2,112,986 parameters on 28x28 grey images with 26 classes"),
    "resnet18-deep": (ResNet18Deep, "ResNet-18 with a head of three layers, as in AF-FCL's code"),
    "acgan-cnn": (ACGANCNN, "the discriminators of FedCIL's code, for grey or for colour images"),
    "resnet18": (ResNet18, "ResNet-18 with a 3x3 stem for small images"),
    "resnet18-imagenet": (ResNet18ImageNet, "ResNet-18 as published, with a 7x7 stem and a max-pool for large images"),
}
INITS = ("torch", "he-fan-out")


class ModelError(SettingError):
    """A model that cannot be built; says which key is wrong and what is allowed."""


def build(
    kind: str,
    input_shape: tuple[int, ...],
    classes: int,
    seed: int,
    options: dict[str, Any] | None = None,
    channels_last: bool = False,
) -> nn.Module:
    """A freshly initialised network; the same seed gives the same weights on every machine.

    kind: a name of MODELS, or `package.module:Name`, called with (input_shape, classes, **options). Every kind that has
    no option `init` of its own takes `init`: "torch", the layers' own initialisation, or "he-fan-out" (`draw_he`).
    """
    factory = _factory(kind)
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in (options or {}).items()}
    init = "torch" if _takes(factory, "init") else options.pop("init", "torch")
    if init not in INITS:
        raise ModelError(f"model.init must be one of {', '.join(INITS)}; got {init!r}")
    _check_options(kind, factory, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.key(seed, "model"))
        try:
            module = factory(input_shape, classes, **options)
        except (TypeError, ValueError) as error:
            raise ModelError(f"model.kind = {kind!r} cannot be built from its options: {error}") from error
        if not isinstance(module, nn.Module):
            raise ModelError(f"model.kind = {kind!r} did not build a torch.nn.Module but {type(module).__name__}")
        if init == "he-fan-out":
            draw_he(module)
    return module.to(memory_format=torch.channels_last) if channels_last else module  # type: ignore[call-overload]


def draw_he(module: nn.Module) -> None:
    """Draw the weights of all convolutions with k x k kernels from N(0, 2 / (k k outputs)): He et al., 2015, with the
    fan out, as in the released code of MFCL, TARGET, LANDER, GLFC and AF-FCL. All else stays as it is."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def _takes(factory: Callable[..., nn.Module], option: str) -> bool:
    """Is it an option of the factory's own?"""
    parameters = inspect.signature(factory).parameters
    return option in list(parameters)[2:] or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _check_options(kind: str, factory: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    for key in options:
        if not _takes(factory, key):
            allowed = dict.fromkeys([*list(inspect.signature(factory).parameters)[2:], "init"])
            raise ModelError(f"model.{key} is not an option of {kind!r}; its options are: {', '.join(allowed)}")


def _factory(kind: str) -> Callable[..., nn.Module]:
    if kind in MODELS:
        return MODELS[kind][0]
    if ":" not in kind:
        raise ModelError(
            f"model.kind: there is no model {kind!r}.{nearest(kind, MODELS)} `everfed list models` shows all; one of "
            "your own is named package.module:Name"
        )
    factory: Callable[..., nn.Module] = load_object(kind, "model.kind")
    return factory
