"""RegMean and LoRM: merging in least squares, by hand and against the pooled solution; what is sent and what stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from everfed.errors import CompositionError
from everfed.methods import registry as methods
from everfed.methods.pretrained.lorm import factor_gram
from everfed.methods.pretrained.regmean import _current_tasks, damped, over, packed, times, unpacked
from everfed.models.lora import LoRALinear
from tests.methods.test_lora import ClassToy, entries
from tests.support.toy import Bench, Norm, Toy

SEEDS = st.integers(0, 2**31)


def merged(weights: list[Tensor], grams: list[Tensor], start: Tensor | None = None) -> Tensor:
    """The merged layer from what clients send."""
    old = torch.zeros_like(weights[0]) if start is None else start
    products = sum(times(w - old, g) for w, g in zip(weights, grams, strict=True))
    assert isinstance(products, Tensor)
    return old + over(products, torch.stack(grams).sum(0))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([*shape, seed]).normal(size=shape))


# RegMean --------------------------------------------------------------------------------------------------------------
def test_scalars_by_hand() -> None:
    """G = 1 and 3, W = 2 and 6: (2 + 18) / 4 = 5."""
    grams = [torch.tensor([1.0], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)]
    weights = [torch.tensor([[w]], dtype=torch.float64) for w in (2.0, 6.0)]
    assert merged(weights, grams).item() == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("alpha", "expected"), [(1.0, (1.1818182, 1.4545455)), (0.0, (5 / 3, 1.5)), (0.5, (1.4255319, 1.4468085))]
)
def test_matrices_by_hand(alpha: float, expected: tuple[float, float]) -> None:
    grams = [torch.tensor([[2.0, 1.0], [1.0, 1.0]]).double(), torch.tensor([[1.0, 0.0], [0.0, 3.0]]).double()]
    weights = [torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[3.0, 2.0]]).double()]
    found = merged(weights, [damped(gram, alpha) for gram in grams])
    assert found[0].tolist() == pytest.approx(expected, abs=1e-7)
    if alpha == 0.0:
        assert torch.allclose(found, merged(weights, [gram.diagonal() for gram in grams]))


@given(SEEDS, st.integers(1, 4))
def test_clients_at_their_own_least_squares_give_the_pooled_solution(seed: int, clients: int) -> None:
    inputs = [normal(4, 9 + k, seed=seed) for k in range(clients)]
    targets = [normal(2, 9 + k, seed=seed + 1) for k in range(clients)]
    weights = [y @ torch.linalg.pinv(x) for x, y in zip(inputs, targets, strict=True)]
    joint = torch.cat(targets, 1) @ torch.linalg.pinv(torch.cat(inputs, 1))
    start = normal(2, 4, seed=seed + 2)
    assert torch.allclose(merged(weights, [x @ x.T for x in inputs], start), joint, atol=1e-10)


@given(SEEDS)
def test_equal_weights_stay_and_equal_grams_average(seed: int) -> None:
    weight, xs = normal(2, 4, seed=seed), [normal(4, 7, seed=seed + k) for k in range(3)]
    grams = [x @ x.T for x in xs]
    assert torch.allclose(merged([weight] * 3, grams, normal(2, 4, seed=seed + 9)), weight, atol=1e-9)
    others = [normal(2, 4, seed=seed + 20 + k) for k in range(3)]
    assert torch.allclose(merged(others, [grams[0]] * 3), torch.stack(others).mean(0), atol=1e-9)


@pytest.mark.parametrize("diagonal", [True, False])
def test_an_input_that_nobody_has_keeps_its_column(diagonal: bool) -> None:
    x = normal(3, 8, seed=0)
    x[1] = 0.0
    gram, start = x @ x.T, normal(2, 3, seed=1)
    weights = [normal(2, 3, seed=2), normal(2, 3, seed=3)]
    found = merged(weights, [gram.diagonal() if diagonal else gram] * 2, start)
    assert torch.allclose(found[:, 1], start[:, 1], atol=1e-12)
    assert torch.allclose(found[:, [0, 2]], torch.stack(weights).mean(0)[:, [0, 2]], atol=1e-9)


@given(SEEDS, st.integers(1, 5))
def test_grams_are_packed_without_loss(seed: int, size: int) -> None:
    x = normal(size, 6, seed=seed)
    grams = [(x @ x.T).triu() + (x @ x.T).triu(1).T, x.square().sum(1)]  # symmetric to the bit
    vector = packed(grams)
    assert len(vector) == size * (size + 1) // 2 + size
    for before, after in zip(grams, unpacked(vector, [(size, size), (size,)]), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_one_client_is_merged_to_its_own_model(alpha: float) -> None:
    """In a run, too: RegMean of a single client is what it trained, where its inputs have full rank."""
    stream = Toy(clients=1, tasks=1, rounds_per_task=1, samples=64)
    found, plain = (
        Bench(n, o, stream=stream).run() for n, o in (("regmean", {"regmean": {"alpha": alpha}}), ("fedavg", {}))
    )
    assert torch.allclose(found.params, plain.params, atol=1e-4)


def test_biases_are_averaged_by_samples() -> None:
    """As FedAvg by samples does it, of clients with 8 and 24; the uniform mean is another."""
    stream = Toy(clients=2, tasks=1, rounds_per_task=1, sizes={(0, 0): 8, (1, 0): 24})
    options = ({"regmean": {"alpha": 0.5}}, {"fedavg": {"weighting": "samples"}}, {"fedavg": {"weighting": "uniform"}})
    cases = [Bench(next(iter(table), ""), table, stream=stream) for table in options]
    ours, by_samples, uniform = (entries(case, case.run().params, "bias") for case in cases)
    for name, bias in ours.items():
        assert torch.allclose(bias, by_samples[name], atol=1e-6) and not torch.allclose(bias, uniform[name], atol=1e-6)


def test_a_whole_run_moves_every_layer_and_sends_sums() -> None:
    bench = Bench("regmean", stream=Toy(tasks=1, rounds_per_task=1))
    moved = entries(bench, bench.run().params - bench.model()["params"], "weight")
    assert all(update.abs().sum() > 0 for update in moved.values())
    assert methods.build("regmean").reveals() == {}


def test_a_matrix_of_no_linear_layer_is_refused() -> None:
    class Words(nn.Module):
        def __init__(self, shape: tuple[int, ...], classes: int) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(300, 3), nn.Linear(48, classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x.flatten(1).long()).flatten(1))  # type: ignore[no-any-return]

    with pytest.raises(CompositionError, match="merges linear layers, but words is a Embedding"):
        Bench("regmean", module=Words).run()
    Bench("regmean", module=Norm).run(rounds=1)


# LoRM -----------------------------------------------------------------------------------------------------------------
def replies(seed: int, clients: int = 3) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """(A, B, the clients' B, the clients' A, their sums of squares)."""
    a, b = normal(2, 5, seed=seed), normal(4, 2, seed=seed + 1)
    bs = [normal(4, 2, seed=seed + 10 + k) for k in range(clients)]
    as_ = [normal(2, 5, seed=seed + 20 + k) for k in range(clients)]
    return a, b, bs, as_, [normal(5, seed=seed + 30 + k).square() for k in range(clients)]


@given(SEEDS)
def test_the_first_order_conditions_hold(seed: int) -> None:
    """sum (B - B_k) S_k = 0 and sum (A - A_k) G_k = 0."""
    a, b, bs, as_, gs = replies(seed)
    grams = [factor_gram({"l.lora_A": a.unsqueeze(0)}, "l", g, "B", 0) for g in gs]
    found = merged(bs, grams, b)
    assert sum((found - one) @ s for one, s in zip(bs, grams, strict=True)).abs().max() < 1e-10  # type: ignore[union-attr]
    found = merged(as_, gs, a)
    assert sum((found - one) * g for one, g in zip(as_, gs, strict=True)).abs().max() < 1e-10  # type: ignore[union-attr]


def test_with_a_full_rank_identity_a_round_of_b_is_regmean() -> None:
    weights, gs = [normal(4, 5, seed=k) for k in range(2)], [normal(5, seed=9 + k).square() for k in range(2)]
    grams = [factor_gram({"l.lora_A": torch.eye(5).unsqueeze(0)}, "l", g, "B", 0) for g in gs]
    assert torch.allclose(merged(weights, grams), merged(weights, gs), atol=1e-12)


def layer(grams: Tensor) -> LoRALinear:
    found = LoRALinear(nn.Linear(5, 4), "name", 2, 2, seed=0)
    found.hold(len(grams), 0)
    found.follow(nn.Parameter(torch.zeros(1)), "grams")
    found = found.double().eval()
    with torch.no_grad():
        found.lora_B.copy_(normal(len(grams), 4, 2, seed=1))
        found.lora_merge.grams.copy_(grams)
        found.lora_merge.task.fill_(len(grams) - 1)
    return found


def update(found: LoRALinear) -> Tensor:
    down, up = found.factors()
    return up @ down


def test_three_quarters_of_a_task_with_three_times_the_inputs() -> None:
    ones = torch.ones(5, dtype=torch.float64)
    found = layer(torch.stack([3 * ones, ones]))
    products = found.lora_B @ found.lora_A
    assert torch.allclose(update(found), 0.75 * products[0] + 0.25 * products[1], atol=1e-12)


@given(SEEDS)
def test_factored_is_dense_merging_of_tasks(seed: int) -> None:
    grams = normal(3, 5, seed=seed).square()
    grams[:, 2] = 0.0  # an input that never was: the mean
    found = layer(grams)
    products = (found.lora_B @ found.lora_A).detach()
    dense = (products * grams.unsqueeze(1)).sum(0) / grams.sum(0).clamp_min(1e-300)
    dense[:, 2] = products[:, :, 2].mean(0)
    assert torch.allclose(update(found), dense, atol=1e-10)


def test_until_a_task_has_ended_its_updates_mean_is_scored() -> None:
    ones = torch.ones(5, dtype=torch.float64)
    found = layer(torch.stack([3 * ones, 0 * ones]))
    assert torch.allclose(update(found), (found.lora_B @ found.lora_A).mean(0), atol=1e-12)


@pytest.mark.parametrize("merged", [False, True])
def test_gram_matrices_are_those_of_the_network_in_training_unless_merged(merged: bool) -> None:
    """Eval mode merges the two tasks, rank 2 r; sums of inputs use the current task's factors alone, rank r."""
    found = layer(torch.zeros(2, 5)).eval()
    rank, own = found.rank, found.lora_A[1]
    with _current_tasks(nn.Sequential(found), merged):
        down, _ = found.factors()
    assert len(down) == (2 * rank if merged else rank) and torch.equal(down, own) != merged
    assert not found.training


def bench(**fields: int) -> Bench:
    return Bench("lorm", {"lorm": {"rank": 2}}, stream=ClassToy(**fields))


def test_rounds_alternate_between_the_factors() -> None:
    """Two tasks of three rounds: B, A, B each; every other factor and head row stays bit for bit."""
    case = bench(rounds_per_task=3, tasks=2)
    vectors = [case.model()["params"], *(outcome.params for outcome in case.after(*range(1, 7)))]
    for index in range(6):
        task, trained = index // 3, "BA"[index % 3 % 2]
        for factor in "AB":
            pairs = zip(*(entries(case, v, f"lora_{factor}").values() for v in vectors[index : index + 2]), strict=True)
            for before, after in pairs:
                assert torch.equal(before[1 - task], after[1 - task])
                assert torch.equal(before[task], after[task]) == (factor != trained)
        before, after = (entries(case, v, "head.weight")["head.weight"] for v in vectors[index : index + 2])
        rows = slice(2 * task, 2 * task + 2)
        assert not torch.equal(before[rows], after[rows])
        assert torch.equal(before[2 - 2 * task : 4 - 2 * task], after[2 - 2 * task : 4 - 2 * task])


def test_replies_have_the_size_of_the_formula() -> None:
    """Four matrices a block, d = 8, r = 2, two blocks, two classes. A round of B: 9 r d numbers a block, r (r + 1) / 2
    for every matrix; of A: 7 r d and 7 d; the head: 2 rows, a triangle of d (d + 1) / 2; float64, but the biases. At a
    task's end 7 d numbers a block."""
    d, r, depth, matrices = 8, 2, 2, 8
    case = bench(clients=1, tasks=1, rounds_per_task=3)
    sizes = [outcome.state.traffic.up["lorm"] for outcome in case.after(1, 2, 3)]
    head = 8 * (2 * d + d * (d + 1) // 2) + 4 * 2
    b_round = 8 * (9 * r * d * depth + matrices * r * (r + 1) // 2) + head
    a_round = 8 * (7 * r * d * depth + 7 * d * depth) + head
    assert sizes[0] == b_round and sizes[1] - sizes[0] == a_round
    assert sizes[2] - sizes[1] == b_round + 8 * 7 * d * depth


def test_one_clients_factor_is_merged_to_itself() -> None:
    """K = 1: a round of B gives the client's own B."""
    case = Bench("lorm", {"lorm": {"rank": 2}}, stream=ClassToy(clients=1, tasks=1, rounds_per_task=1))
    plain = Bench("ffa-lora", {"ffa-lora": {"rank": 2}}, stream=ClassToy(clients=1, tasks=1, rounds_per_task=1))
    ours, theirs = (entries(b, b.run().params, "lora_B") for b in (case, plain))
    for name, value in ours.items():
        assert torch.allclose(value, theirs[name], atol=1e-5)


def test_the_heads_off_diagonal_entries_are_multiplied_by_its_alpha() -> None:
    """Where they vanish, the head is merged by the diagonal alone, which has another form."""
    stream = ClassToy(clients=2, tasks=1, rounds_per_task=1)
    cases = [Bench("lorm", {"lorm": {"rank": 2, "head_alpha": alpha}}, stream=stream) for alpha in (0.0, 1e-12, 1.0)]
    diagonal, vanishing, full = (entries(case, case.run().params, "head.weight")["head.weight"] for case in cases)
    assert torch.allclose(vanishing, diagonal, atol=1e-6) and not torch.allclose(full, diagonal, atol=1e-4)


def test_a_task_end_stores_the_inputs_sums_of_squares() -> None:
    case = bench(tasks=2, rounds_per_task=1)
    before, after = case.run(rounds=1), case.run()
    for name, grams in entries(case, after.params, "grams").items():
        assert (grams.sum(1) > 0).all()
        assert torch.equal(entries(case, before.params, "grams")[name][0], grams[0])
    assert "grams" not in after.state.server["lorm"]


def test_fedgp_is_refused_with_a_reason() -> None:
    parts: list[str] = ["lorm", "memory", "fedgp"]
    with pytest.raises(CompositionError, match="'lorm' trains other factors"):
        methods.build(parts=list(parts))
    with pytest.raises(methods.MethodError):
        methods.build("fedgp+lorm")


def test_sums_are_all_that_the_server_needs() -> None:
    assert methods.build("lorm").reveals() == {}
