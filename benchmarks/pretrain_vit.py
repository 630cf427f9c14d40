"""Pretrains the small Vision Transformer on the first half of a data set's classes, for runs on the other half.

Run as `python -m benchmarks.pretrain_vit --data DIR --out FILE.safetensors [--epochs 100] [--device cuda]`. On
CIFAR-100 (classes 0 to 49): AdamW with a rate of 1e-3 and weight decay 0.05, five epochs of warm-up and a cosine,
batches of 512, crops and flips on the device, label smoothing 0.1; bfloat16 on a GPU. `--dataset digits` pretrains a
smaller network on classes 0 to 4 of scikit-learn's digits in seconds, without a data folder or a GPU.

The file holds the network under timm's names, without its head (`model.weights` reads it); its header says how it was
made. Weights are not part of this repository.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from everfed.data import load
from everfed.data.transforms import crop_and_flip, draw_crop_and_flip, scale
from everfed.models import build
from everfed.streams.draws import generator
from everfed.streams.options import NORMALISATIONS, USUAL_NORMALISATION

RATE, DECAY, SMOOTHING = 1e-3, 0.05, 0.1


@dataclass(frozen=True)
class Setting:
    """What is pretrained on a data set."""

    classes: int
    batch: int
    warm_up: int
    options: dict[str, int]


SETTINGS = {
    "cifar100": Setting(50, 512, 5, {"patch": 4, "width": 192, "depth": 6, "heads": 3}),
    "digits": Setting(5, 32, 1, {"patch": 2, "width": 64, "depth": 3, "heads": 4}),
}


@dataclass(frozen=True)
class Samples:
    """Images in storage form and labels on the device. constants: mean and standard deviation of every channel."""

    x: Tensor
    y: Tensor
    constants: tuple[tuple[float, ...], tuple[float, ...]]

    def inputs(self, rows: Tensor, draws: Tensor | None = None) -> Tensor:
        x = self.x.index_select(0, rows)
        return scale(x if draws is None else crop_and_flip(x, draws), *self.constants)


def samples(x: Tensor, y: Tensor, setting: Setting, normalise: str, device: torch.device) -> Samples:
    """Those of the classes to pretrain on."""
    kept = y < setting.classes
    return Samples(x[kept].to(device), y[kept].to(device), NORMALISATIONS[normalise])


def rate(step: int, warm_up: int, total: int) -> float:
    """Linear to RATE over the warm-up, then a half cosine to 0."""
    if step < warm_up:
        return RATE * (step + 1) / warm_up
    return RATE * 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / max(total - warm_up, 1)))


def train(module: nn.Module, data: Samples, setting: Setting, epochs: int, seed: int) -> None:
    """Train in place; augmented where the images are colour images."""
    device, augmented = data.x.device, data.x.shape[1] == 3
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY)
    batches = max(len(data.x) // setting.batch, 1)
    for epoch in range(epochs):
        rng = generator(seed, "epoch", epoch)
        order = torch.from_numpy(rng.permutation(len(data.x))).to(device)
        draws = torch.from_numpy(draw_crop_and_flip(rng, len(data.x))).to(device) if augmented else None
        for index in range(batches):
            place = slice(index * setting.batch, (index + 1) * setting.batch)
            for group in optimizer.param_groups:
                group["lr"] = rate(epoch * batches + index, setting.warm_up * batches, epochs * batches)
            inputs = data.inputs(order[place], None if draws is None else draws[place])
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                outputs = module(inputs)
            loss = functional.cross_entropy(outputs.float(), data.y[order[place]], label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(module: nn.Module, data: Samples) -> float:
    module.eval()
    rows = torch.arange(len(data.x), device=data.x.device).split(1000)
    correct = sum(int((module(data.inputs(some)).argmax(1) == data.y[some]).sum()) for some in rows)
    return correct / len(data.x)


def pretrain(options: argparse.Namespace) -> dict[str, Any]:
    """Train and write the file; returns what its header says."""
    setting = SETTINGS[options.dataset]
    source = load(options.dataset, options.data)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    normalise = USUAL_NORMALISATION.get(source.name, "none")
    module = build("vit", tuple(source.x_train.shape[1:]), setting.classes, options.seed, dict(setting.options))
    module.to(device)
    train(
        module,
        samples(source.x_train, source.y_train, setting, normalise, device),
        setting,
        options.epochs,
        options.seed,
    )
    found = accuracy(module, samples(source.x_test, source.y_test, setting, normalise, device))
    made = {"dataset": source.name, "classes": setting.classes, "epochs": options.epochs, "seed": options.seed,
            "normalise": normalise, "accuracy": round(found, 4), **setting.options}  # fmt: skip
    weights = {n: t.detach().cpu().contiguous() for n, t in module.state_dict().items() if not n.startswith("head.")}
    save_file(weights, options.out, {name: str(value) for name, value in made.items()})
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=tuple(SETTINGS), default="cifar100")
    parser.add_argument("--data", default=None, help="folder of data sets; by default EVERFED_DATA")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--device", default="", help="cuda or cpu; by default a GPU where there is one")
    parser.add_argument("--seed", type=int, default=0)
    made = pretrain(parser.parse_args(arguments))
    print(", ".join(f"{name} = {value}" for name, value in made.items()))


if __name__ == "__main__":
    main()
