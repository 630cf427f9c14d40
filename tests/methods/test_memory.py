"""The reservoir (Vitter, 1985; FedGP, Algorithm 4), and the alignment of samples, labels and stored outputs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from everfed.core.data import Table, minibatches
from everfed.method import Optimizer, TrainOptions
from everfed.methods.replay.memory import NAME, Memory, replay_rows, stored
from everfed.methods.replay.reservoir import nothing_offered, offers, reservoir_rows
from tests.support.toy import Bench, Norm, Toy


def fill(offers: list[int], size: int, rng: np.random.Generator) -> np.ndarray:
    """Offer 0, 1, 2, ... in minibatches of the given lengths; what each row holds at the end (-1: nothing)."""
    buffer, n = np.full(size + 1, -1), 0
    for count in offers:
        items = np.arange(n, n + count)
        buffer[reservoir_rows(np.ones(count, dtype=bool), n, size, rng)] = items
        n += count
    return buffer[:size]


def one_by_one(draws: list[int], n: int, size: int) -> dict[int, int]:
    """FedGP's ReservoirAdd one sample at a time (Algorithm 4), with the draws given: {row: offer}."""
    held: dict[int, int] = {}
    for offer, draw in enumerate(draws):
        row = n if n < size else draw
        if row < size:
            held[row] = offer
        n += 1
    return held


@given(st.integers(0, 12), st.integers(0, 30), st.lists(st.floats(0, 0.999), min_size=1, max_size=25))
def test_a_minibatch_does_what_samples_one_by_one_would(size: int, n: int, uniform: list[float]) -> None:
    draws = [int(u * (n + i + 1)) for i, u in enumerate(uniform)]
    rng = SimpleNamespace(integers=lambda low, high: np.array(draws))
    rows = reservoir_rows(np.ones(len(draws), dtype=bool), n, size, rng)  # type: ignore[arg-type]
    assert {int(row): i for i, row in enumerate(rows) if row < size} == one_by_one(draws, n, size)
    kept = rows[rows < size]
    assert len(set(kept.tolist())) == len(kept)  # each row is written once


@given(st.integers(0, 15), st.lists(st.integers(0, 9), max_size=8), st.integers(0, 99))
def test_the_length_is_the_smaller_of_offers_and_size(size: int, offers: list[int], seed: int) -> None:
    buffer = fill(offers, size, np.random.default_rng(seed))
    held = buffer[buffer >= 0]
    assert len(held) == min(sum(offers), size)
    assert len(set(held.tolist())) == len(held)
    assert (buffer[: len(held)] >= 0).all()  # filled from the front


@pytest.mark.parametrize("offers", [[20], [7, 13], [1] * 20])
def test_exactly_as_many_offers_as_rows_are_stored_in_order(offers: list[int]) -> None:
    assert fill(offers, 20, np.random.default_rng(0)).tolist() == list(range(20))


def test_every_task_holds_its_share() -> None:
    """Capacity 20, 5 tasks x 200 offers, 2000 repetitions: 4.0 +- 0.15 rows per task, all positions equally likely."""
    rng = np.random.default_rng(0)
    counts = np.zeros(1000)
    for _ in range(2000):
        counts[fill([200] * 5, 20, rng)] += 1
    assert counts.sum() == 2000 * 20
    per_task = counts.reshape(5, 200).sum(1) / 2000
    assert per_task == pytest.approx([4.0] * 5, abs=0.15)
    p = 20 / 1000  # drawn without replacement: counts are correlated by -1/999, hence the factor
    statistic = ((counts - 2000 * p) ** 2).sum() / (2000 * p * (1 - p)) * 999 / 1000
    assert stats.chi2.sf(statistic, 999) > 0.001


def test_minibatches_do_not_bias_it() -> None:
    """Capacity 10, stream 30: 1/3 for early and late items alike (the printed {1..n} gives 0.311 and 0.345)."""
    rng = np.random.default_rng(1)
    counts = np.zeros(30)
    for _ in range(6000):
        counts[fill([7, 7, 7, 7, 2], 10, rng)] += 1
    assert stats.chi2.sf(((counts - 2000) ** 2).sum() / (2000 * 2 / 3) * 29 / 30, 29) > 0.001
    assert counts[:10].mean() / 6000 == pytest.approx(1 / 3, abs=0.01)
    assert counts[-10:].mean() / 6000 == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("size", [1, 4, 19])
def test_the_item_after_the_last_free_row_enters_with_probability_b_over_b_plus_one(size: int) -> None:
    rng = np.random.default_rng(size)
    entered = sum(size in fill([size, 1], size, rng) for _ in range(3000))
    assert stats.binomtest(entered, 3000, size / (size + 1)).pvalue > 0.001


def test_one_row_and_no_row() -> None:
    rng = np.random.default_rng(0)
    held = [int(fill([1] * 6, 1, rng)[0]) for _ in range(3000)]
    assert stats.chisquare(np.bincount(held, minlength=6)).pvalue > 0.001
    assert reservoir_rows(np.ones(3, dtype=bool), 0, 0, rng).tolist() == [0, 0, 0]  # row 0 is the spare one
    assert fill([5], 0, rng).tolist() == []


def test_samples_that_are_not_offered_go_to_the_spare_row() -> None:
    rows = reservoir_rows(np.array([False, True, False, True]), 0, 5, np.random.default_rng(0))
    assert rows.tolist() == [5, 0, 5, 1]


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 12), st.integers(0, 99))
@settings(max_examples=30)
def test_what_was_seen_before_is_not_offered_again(size: int, stored: int, samples: int, seed: int) -> None:
    """The tables of a client without a new sample are those of the general rule, without the work."""
    schedule = minibatches(np.arange(samples) * 7, 2, 4, np.random.default_rng(seed))
    offered, seen = offers("first_visit", schedule.ids, schedule)
    rows = [reservoir_rows(fresh, stored, size, np.random.default_rng(0)) for fresh in offered]
    tables = nothing_offered(schedule, stored, size)
    assert seen.tolist() == schedule.ids.tolist()
    for found, want in (
        (tables["rows"], Table.of(rows)),
        (tables["fill"], Table.of([np.array([stored])] * schedule.steps)),
    ):
        assert (found.values == want.values).all() and (found.lengths == want.lengths).all()


def test_a_client_without_a_new_sample_has_the_same_memory_after_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The general rule is not asked for the second round of a task."""
    asked: list[int] = []

    def counted(*args: object) -> object:
        asked.append(1)
        return offers(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("everfed.methods.replay.reservoir.offers", counted)
    first, second = er(stream=Toy(clients=1, tasks=1)).after(1, 2)
    assert len(asked) == 1
    before, after = first.clients[0][NAME], second.clients[0][NAME]
    assert torch.equal(before["x"], after["x"]) and torch.equal(before["y"], after["y"])
    assert before["host"]["n"] == after["host"]["n"] == 12 and torch.equal(before["host"]["ids"], after["host"]["ids"])


# the part ------------------------------------------------------------------------------------------------------------
def er(offer: str = "first_visit", size: int = 8, epochs: int = 2, **fields: object) -> Bench:
    train = TrainOptions(epochs, 5, Optimizer(lr=0.1))
    return Bench("er", {"memory": {"size": size, "offer": offer}}, train=train, **fields)


@pytest.mark.parametrize("epochs", [1, 5])
def test_the_counter_is_the_number_of_distinct_samples(epochs: int) -> None:
    """It lives over rounds and tasks; epochs do not move it."""
    bench = er(epochs=epochs, stream=Toy(sizes={(0, 1): 7}))
    counted = [outcome.clients[0][NAME]["host"]["n"] for outcome in bench.after(1, 2, 3, 4)]
    assert counted == [12, 12, 12 + 7, 12 + 7]


def test_offering_at_every_visit_counts_visits() -> None:
    assert er("every_visit", epochs=2).run().clients[0][NAME]["host"]["n"] == 4 * 2 * 12


def test_every_visit_fills_the_buffer_with_repetitions_and_first_visit_does_not() -> None:
    def repeated(offer: str) -> int:
        own = er(offer, size=30, epochs=5, stream=Toy(tasks=1)).run().clients[0][NAME]
        rows = len(stored(own))
        return rows - len(torch.unique(own["x"][:rows].flatten(1), dim=0))

    assert repeated("first_visit") == 0
    assert repeated("every_visit") > 0


@pytest.mark.parametrize("size", [0, 1, 8, 12, 13, 24, 100])
def test_a_buffer_never_exceeds_its_size_and_is_filled_from_the_front(size: int) -> None:
    own = er(size=size).run().clients[1][NAME]
    rows = min(24, size)
    assert len(stored(own)) == rows and len(own["x"]) == size + 1
    assert (own["x"][:rows].flatten(1).sum(1) > 0).all()
    assert not own["x"][rows:].any()  # the spare row, too, is wiped: what was rejected is not kept


def test_outputs_of_what_was_rejected_are_not_kept_either() -> None:
    own = Bench("der", stream=Toy(samples=30)).run().clients[0][NAME]
    assert own["logits"][:8].all() and not own["logits"][8].any()


def test_a_buffer_larger_than_all_data_holds_all_of_it() -> None:
    bench = er(size=50)
    own = bench.run().clients[2][NAME]
    data = torch.cat([bench.stream.data(2, task).x for task in (0, 1)])
    stored = own["x"][:24]
    assert torch.equal(torch.unique(stored.flatten(1), dim=0), torch.unique(data.flatten(1), dim=0))


def test_a_buffer_holds_its_own_client_s_samples_with_their_labels() -> None:
    bench = er(size=10)
    outcome = bench.run()
    for client, state in outcome.clients.items():
        known = {
            (tuple(x.flatten().tolist()), int(y))
            for task in (0, 1)
            for x, y in zip(bench.stream.data(client, task).x, bench.stream.data(client, task).y, strict=True)
        }
        own = state[NAME]
        assert {(tuple(own["x"][i].flatten().tolist()), int(own["y"][i])) for i in range(10)} <= known


def test_samples_are_stored_as_they_were_fed() -> None:
    """An augmented image is stored augmented, in storage form."""
    bench = er(size=30, stream=Toy(augmented=True, tasks=1))
    own, data = bench.run().clients[0][NAME], bench.stream.data(0, 0)
    assert own["x"].dtype == torch.uint8
    plain = {tuple(x.flatten().tolist()) for x in data.x}
    shifted = {tuple((x.int() + k).flatten().tolist()) for x in data.x for k in range(30)}
    stored = {tuple(x.flatten().tolist()) for x in own["x"][:12]}
    assert stored <= shifted and not stored <= plain


def test_old_tasks_stay_in_the_buffer() -> None:
    own = er(size=12).run().clients[0][NAME]
    first = {tuple(x.flatten().tolist()) for x in Toy().data(0, 0).x}
    kept = sum(tuple(x.flatten().tolist()) in first for x in own["x"][:12])
    assert 2 <= kept <= 10  # 6 expected


def test_x_y_and_logits_stay_aligned_under_ten_thousand_offers() -> None:
    part, rng = Memory(size=50, logits=True), np.random.default_rng(0)
    own = {"x": torch.zeros(51, 2), "y": torch.zeros(51, dtype=torch.int64), "logits": torch.zeros(51, 3)}
    n = 0
    while n < 10_000:
        ids = torch.arange(n, n + int(rng.integers(1, 40)))
        rows = torch.from_numpy(reservoir_rows(np.ones(len(ids), dtype=bool), n, 50, rng))
        outputs = ids.float().unsqueeze(1).repeat(1, 3) + 0.5
        step = SimpleNamespace(
            state=own,
            rows={"rows": rows},
            x=ids.float().unsqueeze(1).repeat(1, 2),
            y=ids,
            outputs=outputs,
        )
        part.after(step)  # type: ignore[arg-type]
        n += len(ids)
    ids = own["y"][:50]
    assert len(set(ids.tolist())) == 50
    assert torch.equal(own["x"][:50], ids.float().unsqueeze(1).repeat(1, 2))
    assert torch.equal(own["logits"][:50], ids.float().unsqueeze(1).repeat(1, 3) + 0.5)


# draws from the buffer -----------------------------------------------------------------------------------------------
@given(st.integers(0, 10), st.integers(1, 6), st.integers(1, 40))
@settings(max_examples=40)
def test_replayed_rows_are_distinct_and_older_than_the_step(size: int, batch: int, samples: int) -> None:
    """min(b_r, filled) rows, none of which the step itself is about to write."""
    bench = Bench("er", {"memory": {"size": size}, "er": {"batch": batch}})
    part = Memory(size=size)
    schedule = minibatches(np.arange(samples), 2, 5, np.random.default_rng(0))
    tables = part.plan(bench.client(NAME), schedule)
    drawn = replay_rows(bench.client("er", plans={NAME: tables}), batch, "test")
    before = 0
    for step in range(schedule.steps):
        rows = drawn.row(step).tolist()
        assert len(rows) == len(set(rows)) == min(batch, min(before, size))
        assert all(row < min(before, size) for row in rows)
        before = min(before + len(schedule.ids_of(step)), samples)


def test_the_buffer_of_two_methods_is_the_same() -> None:
    """Reservoir decisions have random numbers of their own: FedGP, ER, DER and A-GEM keep the same samples."""
    buffers = [
        Bench(name, module=Norm).run().clients[1][NAME] for name in ("fedgp", "er", "der", "agem", "fedgp+der++")
    ]
    assert all(torch.equal(buffers[0]["x"], other["x"]) for other in buffers)
