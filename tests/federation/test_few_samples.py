"""Recipes of a server under which a reply depends on one sample alone, and the keys of a policy that refuse them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from everfed.core.context import Fewest, TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.federation.client import Identity, RealClient
from everfed.federation.request import REFUSED, REPLY, Answer
from tests.federation.asking import ask, values
from tests.federation.loop import runtime
from tests.support.toy import Bench, Linear, Toy

STREAM = Toy(clients=1, tasks=1, rounds_per_task=3)
ONE = {"fedgp": {"samples": 1}, "memory": {"size": 12}}


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def site(bench: Bench, folder: Path, **fewest: int) -> RealClient:
    built = replace(runtime(bench), fewest=Fewest(**fewest))
    return RealClient(folder, Identity("site-0", 0), lambda recipe, scale: built)


def asked(bench: Bench, folder: Path, **fewest: int) -> tuple[Answer, Answer]:
    """To train, and then for FedGP's reference gradient at the model of zeros."""
    there = site(bench, folder, **fewest)
    trained = ask(there, bench.model())
    return trained, ask(there, bench.model(), phase="reference", place=(0, 1, 0, 0))


def image_in(gradient: torch.Tensor) -> torch.Tensor:
    """Every row of the gradient of a linear map is the sample times a number."""
    rows = gradient.reshape(4, 16)
    row = rows[rows.norm(dim=1).argmax()]
    return row.abs() / row.norm()


def known(image: torch.Tensor) -> float:
    """The cosine to the nearest of the client's images."""
    x = STREAM.inputs(STREAM.data(0, 0).x).reshape(12, -1)
    return float((x @ image / x.norm(dim=1)).max())


def test_a_gradient_of_one_sample_is_that_sample(tmp_path: Path) -> None:
    bench = Bench("fedgp+der", ONE, stream=STREAM, module=Linear)
    _, free = asked(bench, tmp_path / "free")
    assert free.kind == REPLY and known(image_in(values(free)["fedgp"]["gradient"])) > 0.9999
    _, strict = asked(bench, tmp_path / "strict", step=5)
    assert strict.kind == REFUSED and strict.reason.endswith("a step would be computed from fewer than 5 samples")


@pytest.mark.parametrize(
    ("method", "options"), [("fedavg", {}), ("fedcurv", {"fedcurv": {"fisher_samples": 1}})], ids=["batch", "fisher"]
)
def test_steps_and_squared_gradients_of_one_sample(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    batch = 1 if method == "fedavg" else 5
    bench = Bench(method, options, STREAM, TrainOptions(1, batch, Optimizer(lr=0.1)), module=Linear)
    assert ask(site(bench, tmp_path / "free"), bench.model()).kind == REPLY
    assert "fewer than 5 samples" in ask(site(bench, tmp_path / "strict", step=5), bench.model()).reason


def test_a_reply_of_few_samples_is_refused_and_does_not_say_how_few(tmp_path: Path) -> None:
    """Twelve: whatever the server does to the scale or to the division among clients."""
    bench = Bench("fedgp+der", ONE, stream=STREAM, module=Linear)
    trained, reference = asked(bench, tmp_path / "few", reply=13)
    assert [trained.kind, reference.kind] == [REFUSED] * 2
    assert (
        trained.reason.endswith("a reply would be computed from fewer than 13 samples") and "12" not in trained.reason
    )
    assert asked(bench, tmp_path / "enough", reply=12)[0].kind == REPLY


def test_clients_without_samples_say_so_as_before(tmp_path: Path) -> None:
    bench = Bench("fedavg", {}, replace(STREAM, sizes={(0, 0): 0}), module=Linear)
    answer = ask(site(bench, tmp_path, step=5, reply=13), bench.model())
    assert answer.kind == REPLY and not values(answer)
