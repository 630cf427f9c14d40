"""Numbers survive their way through whole numbers, within the bound that the code states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.core.client import Reply
from everfed.privacy.encoding import (
    FINE,
    Code,
    EncodingError,
    Sums,
    common_form,
    decode,
    encode,
    form_from_text,
    form_of,
    form_to_text,
    is_finite,
    sizes,
)

CODE = Code(clip=4.0, bits=16, clients=8)


def added(replies: list[Reply], code: Code = CODE) -> Sums:
    form: dict[str, list[Any]] = {}
    for reply in replies:
        form |= form_of(reply.values)
    form = dict(sorted(form.items()))
    vectors = [encode(reply, form, code) for reply in replies]
    narrow, wide = (np.sum([v[i] for v in vectors], axis=0, dtype=vectors[0][i].dtype) for i in (0, 1))
    assert (len(narrow), len(wide)) == sizes(form)
    return decode(narrow, wide, form, code, len(replies))


floats = st.lists(st.floats(-4, 4, width=32), min_size=5, max_size=5)


@given(st.lists(st.tuples(floats, st.integers(0, 1000), st.booleans()), min_size=1, max_size=8), st.booleans())
@settings(max_examples=100, deadline=None)
def test_sums_are_within_half_a_step_a_client(clients: list[tuple[list[float], int, bool]], weighted: bool) -> None:
    code = Code(4.0, 16, 8, frozenset({"a/p"} if weighted else ()))
    replies = [Reply({"a": {"p": torch.tensor(v)}} if there else {}, n) for v, n, there in clients]
    sums = added(replies, code)
    weights = [(n if weighted else 1) for _, n, there in clients if there]
    if not weights:
        assert sums.totals == {}
        return
    total, weight, dtype = sums.totals["a/p"]
    there = [client for client in clients if client[2]]
    exact = sum(w * torch.tensor(v, dtype=torch.float64) for (v, _, _), w in zip(there, weights, strict=True))
    bound = sum(weights) * code.step * 0.5 + 4.0 * 2.0**-15 * sum(weights)  # and the last step at the clip itself
    assert (weight, dtype) == (float(sum(weights)), torch.float32)
    assert torch.all((total - exact).abs() <= bound)


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=8))
def test_integers_are_exact(values: list[int]) -> None:
    sums = added([Reply({"a": {"n": torch.tensor([v, -v])}}) for v in values])
    assert sums.totals["a/n"][0].tolist() == [float(sum(values)), -float(sum(values))]  # type: ignore[union-attr]
    assert sums.totals["a/n"][2] is torch.int64


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8))
def test_plain_numbers_and_float64_are_fixed_point(values: list[float]) -> None:
    sums = added([Reply({"a": {"x": v, "y": torch.tensor(v, dtype=torch.float64)}}) for v in values])
    for key in ("a/x", "a/y"):
        assert abs(float(sums.totals[key][0]) - math.fsum(values)) <= len(values) / FINE + 1e-6
    assert sums.totals["a/x"][2] is None


def test_losses_steps_and_samples_are_sums_too() -> None:
    sums = added([Reply({}, 10, 5, 2.5), Reply({}, 30, 2, 3.0), Reply({})])
    assert (sums.loss, sums.trained, sums.samples) == (0.5 + 1.5, 2, 40)


def test_what_is_outside_the_clip_is_clipped_and_counted() -> None:
    sums = added([Reply({"a": {"p": torch.tensor([100.0, -100.0, 1.0])}})])
    assert sums.clipped == 2
    assert torch.allclose(sums.totals["a/p"][0], torch.tensor([4.0, -4.0, 1.0]).double(), atol=CODE.step)  # type: ignore


@pytest.mark.parametrize("broken", [Reply({"a": {"p": torch.tensor([math.nan])}}, 1), Reply({}, 1, 1, math.inf)])
def test_a_reply_that_is_not_finite_is_told_from_others(broken: Reply) -> None:
    assert not is_finite(broken) and is_finite(Reply({"a": {"p": torch.tensor([1.0])}}, 5, 1, 1.0))


def test_a_value_of_few_is_not_in_the_common_form() -> None:
    forms = [form_of({"a": {"x": 1.0, **({"y": 1.0} if few else {})}}) for few in (True, True, False)]
    assert list(common_form(forms, 3)) == ["a/x"] and list(common_form(forms, 2)) == ["a/x", "a/y"]


def test_the_ring_is_wide_enough_for_every_client_at_the_clip() -> None:
    for bits, clients, weighted in ((16, 8, False), (24, 200, False), (24, 300, False), (24, 8, True)):
        code = Code(1.0, bits, clients, frozenset({"a/p"} if weighted else ()))
        count = 8
        sums = added([Reply({"a": {"p": torch.tensor([-1.0, 1.0])}}, 1 << 24)] * count, code)
        expected = count * ((1 << 24) if weighted else 1)
        assert torch.allclose(sums.totals["a/p"][0] / expected, torch.tensor([-1.0, 1.0]).double(), atol=2 * code.step)  # type: ignore
    assert Code(1.0, 24, 200).dtype is np.uint32 and Code(1.0, 24, 300).dtype is np.uint64


@pytest.mark.parametrize("value", [torch.tensor([1j]), "text", {"deep": torch.ones(1)}])
def test_what_cannot_be_added_is_refused(value: Any) -> None:
    with pytest.raises(EncodingError):
        form_of({"a": {"p": value}})


def test_numbers_without_room_are_refused() -> None:
    with pytest.raises(EncodingError, match="a/n"):
        added([Reply({"a": {"n": torch.tensor([2**61])}})])


@pytest.mark.parametrize(
    "text",
    [None, 5, "", "[1]", '{"a/p": 1}', '{"a/p": ["float32", [-1]]}', '{"other": ["float32", [1]]}',
     '{"a/p": ["nn", [1]]}', '{"a/p": ["float32", [1099511627776, 1099511627776]]}', "[" * 100000],
)  # fmt: skip
def test_forms_of_strangers_are_checked(text: Any) -> None:
    with pytest.raises(EncodingError):
        form_from_text(text, frozenset({"a/p"}))


def test_a_form_survives_its_text() -> None:
    form = form_of({"a": {"p": torch.ones(2, 3), "n": 3, "none": None}})
    assert form == {"a/n": ["number", []], "a/p": ["float32", [2, 3]]}
    assert form_from_text(form_to_text(form), frozenset(form)) == form


# what is no sum of replies -------------------------------------------------------------------------------------------
def two(samples: int = 3) -> tuple[list[np.ndarray], dict[str, list[Any]]]:
    replies = [Reply({"p": {"x": torch.full((4,), 1.5), "n": torch.tensor([2])}}, samples, 1, 0.5) for _ in range(2)]
    form = form_of(replies[0].values)
    vectors = [encode(reply, form, CODE) for reply in replies]
    return [np.sum([v[i] for v in vectors], axis=0, dtype=vectors[0][i].dtype) for i in (0, 1)], form


def test_the_largest_sums_that_replies_can_have_are_accepted() -> None:
    """Two clients at the limit of 2^15 - 1 steps: 65534 steps of 2^-13."""
    (narrow, wide), form = two()
    narrow[:] = 2 * CODE.limit
    assert decode(narrow, wide, form, CODE, 2).totals["p/x"][0].tolist() == [65534 / 8192] * 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("entry", "value", "match"),
    [
        (-1, 9, "clipped"),  # of eight numbers
        (-2, -1, "samples"),
        (-2, (2 << 24) + 1, "samples"),
        (-3, 3, "trained"),
        (-4, (1 << 62) + 1, "loss"),
        (-5, 3, "p/x has a weight of 3 from 2 clients"),
        (-6, -1, "p/n has a weight of -1"),
        (0, (1 << 62) + 1, "numbers are larger"),
    ],
)
def test_numbers_that_no_replies_add_up_to_are_refused(entry: int, value: int, match: str) -> None:
    (narrow, wide), form = two()
    wide[entry] = np.int64(value).view(np.uint64)
    with pytest.raises(EncodingError, match=match):
        decode(narrow, wide, form, CODE, 2)


@pytest.mark.parametrize("value", [2 * CODE.limit + 1, -2 * CODE.limit - 1])
def test_a_sum_beyond_the_clip_of_all_clients_is_refused(value: int) -> None:
    (narrow, wide), form = two()
    narrow[2] = np.int32(value).view(np.uint32)
    with pytest.raises(EncodingError, match="p/x is larger than 2 clients can make it"):
        decode(narrow, wide, form, CODE, 2)
