"""The campaign of `benchmarks.campaign`: its lists are what they claim, and a slice of every piece holds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from benchmarks import campaign
from benchmarks.campaign_faults import FAULTS, STALLS, drawn
from benchmarks.campaign_lies import PLAIN, SECURE, Liar
from benchmarks.campaign_requests import Target, is_refusal, requests
from everfed.federation.certificates import make_authority, make_client
from tests.federation.field import outcome, simulated, small_recipe


def test_there_are_more_than_two_hundred_requests_and_replies_and_each_fault_comes_before_any_comes_again(
    tmp_path: Path,
) -> None:
    make_authority(tmp_path)
    make_client(tmp_path, "spare")
    made = requests(Target(1, tmp_path, nodes=[5, 6], run=1), random.Random(0))
    assert len({one.name for one in made if "another" not in one.name}) >= 150
    assert len(set(PLAIN)) + len(set(SECURE)) >= 200
    names = drawn(random.Random(1), len(FAULTS))
    assert set(names) == set(FAULTS) and set(STALLS) <= set(FAULTS)
    assert drawn(random.Random(1), 5) == names[:5]


def test_what_nobody_answers_is_a_refusal_and_an_answer_is_none() -> None:
    assert is_refusal("status 403") and is_refusal("ConnectError") and is_refusal("0 bytes")
    assert not is_refusal("status 200")


def test_the_reference_without_anything_left_out_is_the_simulation(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, 3, method="fedgp+der")
    whole = campaign.simulated(recipe, {}, tmp_path / "whole")
    assert whole == outcome(simulated(recipe, tmp_path / "run"))["model"]
    assert whole != campaign.simulated(recipe, {(0, "train", 0): {1}}, tmp_path / "part")


def test_a_plan_of_lies_goes_on_where_it_was_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Liar, "plan", tmp_path / "plan.json", raising=False)
    monkeypatch.setattr(Liar, "lies", ["refused", "failed"], raising=False)
    for expected in ("refused", "failed", None):
        liar = Liar(None, None, "")
        assert liar._next("train", 0) == expected
        if expected:
            liar._note(expected, "train", (0, 0, 0, 0))


@pytest.mark.slow
@pytest.mark.federation
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("piece", "share"), [("outsiders", 0.1), ("liars", 0.08), ("secure", 0.06), ("faults", 0.1), ("stalls", 0.1)]
)
def test_a_slice_of_the_campaign_holds(piece: str, share: float, tmp_path: Path) -> None:
    seen = campaign.run(piece, tmp_path, seed=7, share=share)
    assert seen["ended"] and seen["same_bits"], seen
    assert not seen.get("not_refused") and not seen.get("hung"), seen
