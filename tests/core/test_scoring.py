"""Logits to counts: the three rules and top-k, against argmax and topk; nothing leaves the device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.core import evaluate as scoring

BLOCKS = ((0, 1), (2, 3), (4, 5), (6, 7, 8, 9, 10, 11))
CLASSES = 12


@st.composite
def scored(draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with many ties, labels, and the task of every label."""
    n = draw(st.integers(1, 16))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randint(-3, 4, (n, CLASSES), generator=generator).float()
    labels = torch.randint(0, CLASSES, (n,), generator=generator)
    task_of = torch.tensor([t for t, block in enumerate(BLOCKS) for _ in block])
    return logits, labels, task_of[labels]


def test_rules_on_one_sample() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.9, 0.2]])
    label = torch.tensor([1])
    seen, task = scoring.class_mask([0, 1, 2], 4), scoring.class_mask([0, 1], 4)
    counts = scoring.correct_counts(logits, label, seen, task)
    assert {rule: int(count) for rule, count in counts.items()} == {"full": 0, "seen": 0, "task": 1}
    counts = scoring.correct_counts(logits, label, seen, task, k=2)
    assert {rule: int(count) for rule, count in counts.items()} == {"full": 1, "seen": 1, "task": 1}
    assert tuple(counts) == scoring.RULES


@given(scored())
def test_full_rule_is_argmax(batch) -> None:
    logits, labels, _ = batch
    assert torch.equal(scoring.hits(logits, labels), logits.argmax(-1) == labels)


@given(scored())
def test_masked_rule_is_argmax_of_masked_logits(batch) -> None:
    logits, labels, tasks = batch
    allowed = scoring.task_masks(BLOCKS, CLASSES)[tasks]
    expected = logits.masked_fill(~allowed, -torch.inf).argmax(-1) == labels
    assert torch.equal(scoring.hits(logits, labels, allowed), expected)


@given(st.integers(0, 2**31), st.integers(1, CLASSES))
def test_top_k_is_topk_where_nothing_ties(seed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randperm(CLASSES, generator=generator) for _ in range(8)]).float()
    labels = torch.randint(0, CLASSES, (8,), generator=generator)
    expected = (logits.topk(k).indices == labels[:, None]).any(-1)
    assert torch.equal(scoring.hits(logits, labels, k=k), expected)


@given(scored(), st.integers(1, CLASSES))
def test_task_il_is_no_worse_than_class_il(batch, k: int) -> None:
    logits, labels, tasks = batch
    seen = scoring.class_mask(range(CLASSES), CLASSES)
    counts = scoring.correct_counts(logits, labels, seen, scoring.task_masks(BLOCKS, CLASSES)[tasks], k)
    assert counts["full"] == counts["seen"] <= counts["task"]


@given(scored())
def test_task_il_is_class_il_for_one_task(batch) -> None:
    logits, labels, _ = batch
    everything = scoring.class_mask(range(CLASSES), CLASSES)
    counts = scoring.correct_counts(logits, labels, everything, everything)
    assert counts["full"] == counts["seen"] == counts["task"]


@given(scored())
def test_top_10_is_no_worse_than_top_1(batch) -> None:
    logits, labels, tasks = batch
    assert (scoring.hits(logits, labels, k=10) >= scoring.hits(logits, labels)).all()
    assert scoring.hits(logits, labels, scoring.task_masks(BLOCKS, CLASSES)[tasks], k=10).all()


def test_top_10_of_ten_classes_is_always_right() -> None:
    assert scoring.hits(torch.zeros(10, 10), torch.arange(10), k=10).all()


@given(scored(), st.permutations(range(CLASSES)))
def test_class_order_does_not_matter_without_ties(batch, order: list[int]) -> None:
    logits, labels, _ = batch
    logits = logits + torch.linspace(0, 0.5, CLASSES)
    permutation = torch.tensor(order)
    moved = torch.empty_like(permutation)
    moved[permutation] = torch.arange(CLASSES)
    assert torch.equal(scoring.hits(logits[:, permutation], moved[labels]), scoring.hits(logits, labels))


def test_unseen_rows_with_a_huge_bias_change_nothing_under_the_seen_rule() -> None:
    logits, labels = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 4
    grown = torch.cat([logits, torch.full((50, 3), 1e9)], dim=-1)
    seen = scoring.class_mask(range(4), 7)
    assert torch.equal(scoring.hits(grown, labels, seen), scoring.hits(logits, labels))
    assert not scoring.hits(grown, labels).any()


def test_a_label_that_may_not_answer_is_wrong() -> None:
    seen = scoring.class_mask([0, 1], 3)
    assert not scoring.hits(torch.tensor([[0.0, 0.0, 9.0]]), torch.tensor([2]), seen, k=3).any()


def test_a_model_that_diverged_is_wrong() -> None:
    labels = torch.arange(3)
    assert not scoring.hits(torch.full((3, 3), torch.nan), labels).any()
    assert not scoring.hits(torch.tensor([[1.0, torch.nan, 0.0]]), torch.tensor([0])).any()
    assert not scoring.hits(torch.tensor([[torch.nan, 1.0, 0.0]]), torch.tensor([0])).any()


def test_token_logits_are_scored_token_by_token() -> None:
    logits = torch.eye(5).expand(2, 5, 5)
    assert scoring.hits(logits, torch.arange(5).expand(2, 5)).shape == (2, 5)
    assert scoring.hits(logits, torch.arange(5).expand(2, 5)).all()


def test_nothing_is_read_back_from_the_device() -> None:
    """Tensors on the meta device hold no values: reading one raises."""
    logits = torch.empty(8, CLASSES, device="meta")
    labels = torch.empty(8, dtype=torch.int64, device="meta")
    mask = torch.empty(CLASSES, dtype=torch.bool, device="meta")
    counts = scoring.correct_counts(logits, labels, mask, mask.expand(8, CLASSES), k=5)
    assert all(count.device.type == "meta" and count.shape == () for count in counts.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_host_synchronisation_on_a_gpu() -> None:
    logits, labels = torch.randn(8, CLASSES, device="cuda"), torch.arange(8, device="cuda")
    mask = scoring.class_mask(range(8), CLASSES).to("cuda")
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scoring.correct_counts(logits, labels, mask, mask, k=5)
    finally:
        torch.cuda.set_sync_debug_mode(previous)


def test_masks() -> None:
    assert scoring.class_mask([2, 0], 4).tolist() == [True, False, True, False]
    assert scoring.class_mask([], 2).tolist() == [False, False]
    assert scoring.task_masks([(0,), (1,)], 2).tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("labels", [[4], [-1]])
def test_a_label_outside_the_head(labels: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit a head with 4 classes; allowed: 0 to 3"):
        scoring.class_mask(labels, 4)


def test_top_0() -> None:
    with pytest.raises(ValueError, match="k of 1 or more, got 0"):
        scoring.hits(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), k=0)


def test_reading_results_does_not_import_torch() -> None:
    code = "import sys; from everfed.metrics import summary; summary([[.5]]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
