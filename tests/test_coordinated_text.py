"""The experiment on text that drifts: its control strategies, its users, its verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import coordinated_text as experiment
from everfed.recipe import read


def test_most_aligned_in_literal_numbers() -> None:
    """At 0, 10, 20, 90 and 180 degrees the one at 20 is nearest to all others; then come 10 and 0."""
    angles = np.deg2rad([0.0, 10.0, 20.0, 90.0, 180.0])
    vectors = np.stack([np.cos(angles), np.sin(angles)])
    assert experiment.aligned(vectors.T @ vectors, 3).tolist() == [2, 1, 0]
    assert experiment.aligned(np.eye(2), 5).tolist() == [0, 1]


def test_most_aligned_is_the_longest_sum_of_all_pairs() -> None:
    vectors = np.array([[1.0, 0.0], [0.98, 0.2], [0.0, 1.0], [-1.0, 0.0]])
    gram = vectors @ vectors.T
    assert set(experiment.aligned(gram, 2)) == {0, 1}


@given(st.lists(st.integers(3, 24), min_size=6, max_size=30), st.integers(1, 5), st.integers(0, 100))
def test_matched_samples_are_different_and_as_long_as_the_wanted_ones(lengths: list[int], size: int, seed: int) -> None:
    rng, own = np.random.default_rng(seed), np.array(lengths)
    wanted = own[rng.choice(len(own), size=size, replace=False)]
    chosen = experiment.matched(own, wanted, rng)
    assert len(set(chosen.tolist())) == size
    assert sorted(own[chosen]) == sorted(wanted), "the wanted ones themselves are among those to draw from"


def outcome(name: str, size: int, seed: int, perplexity: float, forgotten: float) -> Any:
    from types import SimpleNamespace as Fake

    job = Fake(row=f"{name}|{size}", recipe=Fake(seed=seed))
    return Fake(job=job, result={"metrics": {"perplexity": perplexity, "forgetting_factor": forgotten}})


def test_the_table_in_literal_numbers() -> None:
    """Two seeds: differences -1 and -3, mean -2, s = sqrt 2, half width 12.706 s / sqrt 2 = 12.706."""
    found = [outcome("no replay", 0, seed, 100.0, 8.0) for seed in (0, 1)]
    found += [outcome("random", 5, seed, 50.0, 2.0) for seed in (0, 1)]
    found += [outcome("diverse, alone", 5, seed, 49.0 - 2 * seed, 1.0) for seed in (0, 1)]
    none, random, diverse = experiment.rows(found)
    assert none["rcp"] == (0.0, 0.0) and random["rcp"] == (-0.5, 0.0)
    assert diverse["minus_random"] == pytest.approx((-2.0, 12.706))
    assert random["minus_random"] is None
    assert "diverse, alone" in experiment.as_table([none, random, diverse])
    assert experiment.verdict([none, random, diverse]).endswith("Better than random (95 % interval): none.")


def test_without_forgetting_nothing_is_concluded() -> None:
    found = [outcome("no replay", 0, seed, 100.0, 1.0 - 2 * seed) for seed in (0, 1)]
    assert "replay cannot be judged" in experiment.verdict(experiment.rows(found))


def test_users_are_active_in_every_period(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for corpus in experiment.CORPORA:
        rows = [{"label": n % 4, "text": f"{corpus} {n}"} for n in range(6000)]
        (tmp_path / "text" / f"{corpus}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    experiment.make_users(tmp_path, tmp_path / "users.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "users.jsonl").read_text().splitlines()]
    counts: dict[tuple[str, int], int] = {}
    for line in lines:
        counts[line["user"], line["time"]] = counts.get((line["user"], line["time"]), 0) + 1
        assert line["text"].startswith(experiment.CORPORA[line["time"]])
    assert len(counts) == experiment.USERS * len(experiment.CORPORA) and set(counts.values()) == {experiment.TEXTS}
    assert len({line["text"] for line in lines}) == len(lines), "no text is used twice"


def test_the_recipe_is_valid_and_every_strategy_a_method(tmp_path: Path) -> None:
    cells = experiment.grid(tmp_path, (5, 20), (0,))
    assert len(cells) == 1 + 2 * len(experiment.STRATEGIES)
    assert read(experiment.RECIPE).eval.zero_shot
