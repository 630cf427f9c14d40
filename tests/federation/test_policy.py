"""What a client agrees to: every key of its policy refuses what it names, at both ends, and nothing is computed."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everfed.cli import app
from everfed.federation import request as ask
from everfed.federation.client import ClientRuntime, Identity, RealClient
from everfed.federation.packet import PROTOCOL, Packet, digest
from everfed.federation.policy import Guard, Policy, PolicyError
from everfed.federation.request import Answer, Request, Step
from everfed.federation.runtime import RuntimeBuilder
from everfed.recipe import to_toml
from tests.federation.field import RECIPE, small_recipe
from tests.federation.loop import federated, loop_of, runtime
from tests.support.toy import Bench

DP = ("privacy.dp.kind=local", "privacy.dp.noise=0.5", "privacy.dp.budget=9.0")


def answered(folder: Path, policy: Policy, *sets: str, method: str = "fedavg") -> Answer:
    """The answer of a client with this policy to the first request of a run. Its step has no message: a recipe that is
    not refused fails in training, after the policy has let it pass."""
    text = to_toml(small_recipe(folder, 2, *sets, method=method)).encode()
    budget = policy.strictest_budget(0.0)
    site = RealClient(folder / "state", Identity("site-0", 0), RuntimeBuilder(policy=policy), budget=budget)
    return Answer.of(Guard(site, policy).answer(request(text)))


def request(recipe: bytes, round_index: int = 0) -> Packet:
    made = Request("a1", 1, 0, digest(recipe), 1.0, (0, 0, 0, 0), (Step("train", (round_index, 0, 0, 0), 0, "", ()),))
    return Packet(made.header(), {ask.RECIPE: recipe})


@pytest.mark.parametrize(
    ("policy", "sets", "method", "reason"),
    [
        ({"require_secure_aggregation": True}, (), "fedavg", "policy require_secure_aggregation"),
        ({"min_noise": 1.0}, (), "fedavg", "policy min_noise: the recipe must have privacy.dp of kind 'local'"),
        ({"min_noise": 1.0}, ("privacy.dp.kind=central",), "fedavg", "must have privacy.dp of kind 'local'"),
        ({"min_noise": 0.1}, (*DP, "privacy.dp.seed=3"), "fedavg", "without a seed"),
        ({"min_noise": 1.0}, DP, "fedavg", "policy min_noise = 1.0: the recipe has privacy.dp.noise = 0.5"),
        ({"budget": 8.0}, (), "fedavg", "a privacy budget of 8, and the recipe has no [privacy.dp]"),
        ({"budget": 8.0}, (*DP, "privacy.dp.seed=3"), "fedavg", "privacy.dp.seed set"),
        ({"allow_collect": False}, (), "fedomg", "policy allow_collect = false"),
        ({"parts": ["fedavg", "memory"]}, (), "der", "policy parts: the recipe's method has der"),
        ({"phases": ["train"]}, (), "coordinated", "policy phases: the recipe's method has"),
        ({"recipes": ["ab" * 16]}, (), "fedavg", "policy recipes: the recipe's digest is"),
        ({"models": ["resnet18"]}, (), "fedavg", "policy models: the recipe has model.kind = 'mlp'"),
        ({"least_batch": 16}, ("train.batch_size=1",), "fedavg", "policy least_batch = 16"),
        ({"require_roster": True}, (), "fedavg", "policy require_roster: the recipe has no privacy.secure_aggregation"),
    ],
)
def test_a_recipe_that_asks_for_more_is_refused_by_name(
    policy: dict[str, object],
    sets: tuple[str, ...],
    method: str,
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        answer = answered(tmp_path, Policy(**policy), *sets, method=method)
    assert answer.kind == ask.REFUSED and reason in answer.reason
    assert any(reason in record.getMessage() for record in caplog.records)
    assert not list((tmp_path / "state").glob("*/*")), "what is refused is not stored either"


@pytest.mark.parametrize(
    ("policy", "sets", "method"),
    [
        ({}, (), "fedavg"),
        ({"min_noise": 0.5, "budget": 9.0}, DP, "fedavg"),
        ({"allow_collect": False, "parts": ["fedavg", "memory", "der"], "phases": ["train", "evaluate"]}, (), "der"),
        ({"parts": ["fedavg"], "phases": ["train", "evaluate"]}, ("privacy.secure_aggregation=true",), "fedavg"),
        ({"parts": ["fedavg"]}, DP, "fedavg"),
        ({"models": ["mlp"], "least_batch": 8, "least_samples": 20, "least_scale": 1.0}, (), "fedavg"),
    ],
)
def test_a_recipe_within_the_policy_passes(
    policy: dict[str, object], sets: tuple[str, ...], method: str, tmp_path: Path
) -> None:
    assert "policy" not in answered(tmp_path, Policy(**policy), *sets, method=method).reason


@pytest.mark.parametrize(
    ("own", "option", "least"), [(None, 0.0, 0.0), (None, 3.0, 3.0), (8.0, 0.0, 8.0), (8.0, 3.0, 3.0)]
)
def test_of_two_budgets_the_smaller_holds(own: float | None, option: float, least: float) -> None:
    assert Policy(budget=own).strictest_budget(option) == least


@pytest.mark.parametrize(
    ("plain", "changed"),
    [
        ('name = "fedavg"', 'parts = ["fedavg", "intruder:Part"]'),
        ('kind = "mlp"', 'kind = "intruder:build"'),
    ],
)
def test_code_that_the_client_did_not_allow_is_not_imported(
    plain: str, changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that lies on the client's path: importing it alone would run it."""
    (tmp_path / "intruder.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "intruder", raising=False)
    recipe = RECIPE.format(clients=2, rounds=1).replace(plain, changed).encode()
    site = RealClient(tmp_path / "state", Identity("site-0", 0), RuntimeBuilder())
    answer = Answer.of(Guard(site, Policy()).answer(request(recipe)))
    assert "the module 'intruder' is not allowed here" in answer.reason
    assert not (tmp_path / "imported").exists()
    Guard(site, Policy(code=["intruder"])).answer(request(recipe))
    assert (tmp_path / "imported").exists()


def test_bytes_and_seconds_are_counted_by_round(tmp_path: Path) -> None:
    """The model of the toy run has a few hundred bytes; what is over the limit is not sent, and the next round may."""
    bench = Bench("fedavg")
    loop = loop_of(bench, tmp_path / "free")
    federated(bench, loop)
    packet = loop.sent[0][1]
    used = sum(map(len, packet.pieces.values()))
    site = RealClient(tmp_path / "a", Identity("site-0", 0), lambda recipe, scale: runtime(bench))
    assert "policy max_bytes" in Answer.of(Guard(site, Policy(max_bytes=used)).answer(packet)).reason
    assert "policy max_bytes" in Answer.of(Guard(site, Policy(max_bytes=used - 1)).answer(packet)).reason
    enough = Guard(site, Policy(max_bytes=3 * used))
    assert Answer.of(enough.answer(packet)).kind == ask.REPLY
    enough.answer(packet)  # the same round again: answered from the journal, and counted
    assert "policy max_bytes" in Answer.of(enough.answer(packet)).reason
    later = {
        **packet.header,
        "steps": json.dumps([[*step[:1], [1, 0, 0, 0], *step[2:]] for step in packet.json("steps")]),
    }
    assert "policy" not in Answer.of(enough.answer(Packet(later, packet.pieces))).reason


def test_a_step_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    def build(recipe: str, scale: float) -> ClientRuntime:
        time.sleep(30)
        raise AssertionError("not ended")

    site = RealClient(tmp_path, Identity("site-0", 0), build)
    guard = Guard(site, Policy(max_seconds=0.05))
    for _ in range(2):  # the second time there is no second left at all
        assert "policy max_seconds = 0.05" in Answer.of(guard.answer(request(b"name = 'x'\n"))).reason


class Slow:
    def __del__(self) -> None:
        time.sleep(30)  # ended by the first alarm, whose error Python drops: nothing can be raised by a destructor


def test_a_step_that_is_in_a_destructor_when_its_time_is_over_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everfed.federation.policy.AGAIN", 0.1)
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)

    def build(recipe: str, scale: float) -> ClientRuntime:
        Slow()
        time.sleep(30)
        raise AssertionError("not ended")

    guard = Guard(RealClient(tmp_path, Identity("site-0", 0), build), Policy(max_seconds=0.5))
    assert "policy max_seconds = 0.5" in Answer.of(guard.answer(request(b"name = 'x'\n"))).reason


def test_anything_else_is_answered_as_before(tmp_path: Path) -> None:
    site = RealClient(tmp_path, Identity("site-0", 0), RuntimeBuilder())
    guard, before = Guard(site, Policy(max_bytes=10, max_seconds=10)), signal.getsignal(signal.SIGALRM)
    assert guard.answer(Packet({"protocol": PROTOCOL, "kind": ask.HELLO})).header["name"] == "site-0"
    assert Answer.of(guard.answer(Packet({"protocol": PROTOCOL, "kind": "x"}))).kind == ask.REFUSED
    assert signal.getsignal(signal.SIGALRM) is before  # an alarm of the user's own still has its handler


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min_nois = 1", "min_nois: Extra inputs are not permitted; the keys are recipes, models"),
        ("min_noise = -1", "min_noise: Input should be greater than 0"),
        ("allow_collect = 'no'", "allow_collect: Input should be a valid boolean"),
        ("parts = 'fedavg'", "parts: Input should be a valid list"),
        ("= 3", "is not TOML"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_at_once(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    path = tmp_path / "policy.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PolicyError, match=said.split(";")[0]):
        Policy.read(path)
    monkeypatch.chdir(tmp_path)
    words = ["join", "--server", "localhost:1", "--insecure", "--policy", str(path)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == 2 and said in " ".join(result.output.split())
