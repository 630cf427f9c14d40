"""Servers that learn exact bits of samples under local noise: by overflowing models, failing steps, error texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.core.message import Model
from everfed.federation.client import Identity, RealClient
from everfed.federation.request import FAILED, REFUSED, REPLY, Answer
from everfed.method import Client, Method, Part, Phase, Sum
from everfed.methods import registry as methods
from everfed.privacy.accountant import composed, multiplier
from everfed.privacy.differential import private
from everfed.store.ledger import PRIVACY_LEDGER
from tests.federation.asking import ask, values
from tests.federation.loop import runtime
from tests.support.toy import Bench, Linear, Toy

pytest.importorskip("dp_accounting", reason="pip install 'everfed[privacy]'")
NOISE, PIXEL = 20.0, 5


@dataclass(frozen=True)
class Bytes(Toy):
    """Pixels from 0 to 255."""

    def inputs(self, x: Tensor) -> Tensor:
        return x.float()


STREAM = Bytes(clients=1, tasks=1, rounds_per_task=3)
LARGEST = float(STREAM.inputs(STREAM.data(0, 0).x).reshape(12, -1)[:, PIXEL].max())


def bench_of(*parts: Part) -> Bench:
    def method() -> Method:
        plain = methods.build("fedavg")
        return private(replace(plain, parts=(*plain.parts, *parts)), kind="local", noise=NOISE)

    return Bench(method, stream=STREAM, module=Linear)


def site(bench: Bench, folder: Path, budget: float = 0.0) -> RealClient:
    return RealClient(folder, Identity("site-0", 0), lambda recipe, scale: runtime(bench), budget=budget)


def overflowing(bench: Bench, threshold: float) -> Model:
    """One logit is beyond every float exactly where the pixel is brighter than `threshold`."""
    weights = torch.zeros(4, 16)
    weights[0, PIXEL] = torch.finfo(torch.float32).max / threshold
    return {**bench.model(), "params": weights.reshape(-1)}


def charged(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / PRIVACY_LEDGER).read_text().splitlines()]
    return [line["multiplier"] for line in lines if "multiplier" in line]


def test_a_model_that_overflows_on_a_bright_pixel_tells_nothing(tmp_path: Path) -> None:
    """Fourteen questions found the largest pixel exactly, at any noise and for nothing."""
    bench = bench_of()
    answers, costs = [], []
    for name, threshold in (("below", LARGEST * 0.999), ("above", LARGEST * 1.001)):
        answers.append(ask(site(bench, tmp_path / name), overflowing(bench, threshold)))
        costs.append(charged(tmp_path / name))
    assert [answer.kind for answer in answers] == [REPLY, REPLY]
    assert costs == [[multiplier(NOISE, 1, 2.0)]] * 2
    noise = [values(answer)["fedavg"]["params"] for answer in answers]
    assert all(bool(one.isfinite().all()) and float(one[-16:].std()) > NOISE / 3 for one in noise)


@pytest.mark.parametrize("count", [0, 1])
def test_a_client_without_samples_replies_like_any_other(count: int, tmp_path: Path) -> None:
    """The server names the task, and so learned for every period, without noise, whether there are samples."""
    bench = replace(bench_of(), stream=replace(STREAM, sizes={(0, 0): count}))
    answer = ask(site(bench, tmp_path), bench.model())
    sizes = {key: len(value) for key, value in values(answer)["fedavg"].items()}
    assert sizes == {"params": 64, "stats": 0, "counters": 0}
    assert float(values(answer)["fedavg"]["params"].std()) > NOISE / 3
    assert charged(tmp_path) == [multiplier(NOISE, 1, 2.0)]


def test_a_spent_budget_refuses_before_anything_is_computed(tmp_path: Path) -> None:
    bench = bench_of()
    there = site(bench, tmp_path, composed({multiplier(NOISE, 1, 2.0): 1}, 1e-5) + 1e-6)
    assert ask(there, bench.model()).kind == REPLY
    found = [ask(there, overflowing(bench, t), place=(1, 0, 0, 0)) for t in (LARGEST * 0.999, LARGEST * 1.001)]
    assert [one.kind for one in found] == [REFUSED] * 2 and found[0].reason == found[1].reason
    assert len(charged(tmp_path)) == 1


class Fails(Part):
    """Raises where the pixel is brighter than the threshold, in training and in a phase of its own."""

    name = "fails"

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def _look(self, client: Client) -> None:
        if float(client.data.x.reshape(len(client.data), -1)[:, PIXEL].max()) > self.threshold:
            raise ValueError(f"a pixel of {client.data.x.max()} in /home/me/patients.csv")

    def start(self, client: Client) -> None:
        self._look(client)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("statistics", reduce={"sum": Sum()}, run=self._statistics),)

    def _statistics(self, client: Client) -> dict[str, Any]:
        if client.round:
            self._look(client)
        return {"sum": torch.ones(3)}


def sure(answer: Answer, key: Callable[[Answer], Any]) -> tuple[str, Any]:
    assert "patients" not in answer.reason and "pixel" not in answer.reason
    return answer.kind, key(answer)


def test_a_step_that_fails_looks_like_any_other(tmp_path: Path) -> None:
    found = []
    for name, threshold in (("below", LARGEST * 0.999), ("above", LARGEST * 1.001)):
        bench = bench_of(Fails(threshold))
        there = site(bench, tmp_path / name)
        steps = [("statistics", (0, 0, 0, 0)), ("train", (0, 1, 0, 0)), ("statistics", (1, 0, 0, 0))]
        answers = [ask(there, bench.model(), phase=phase, place=place) for phase, place in steps]
        forms = [
            {f"{p}/{k}": tuple(v.shape) for p, tree in values(one).items() for k, v in tree.items() if len(v)}
            for one in answers
        ]
        found.append(([one.kind for one in answers], forms, charged(tmp_path / name)))
    assert found[0] == found[1]
    assert found[0][0] == [REPLY] * 3 and found[0][1][2] == {"fails/sum": (3,)}


def test_an_error_tells_the_server_nothing_of_samples_and_files(tmp_path: Path) -> None:
    """Without noise, too: whatever a user's code says stays in the client's log."""

    def method() -> Method:
        plain = methods.build("fedavg")
        return replace(plain, parts=(*plain.parts, Fails(0.0)))

    bench = Bench(method, stream=STREAM, module=Linear)
    answer = ask(site(bench, tmp_path), bench.model())
    assert answer.kind == FAILED and answer.reason == "the step failed; the reason is in the client's log"
