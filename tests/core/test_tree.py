"""Trees survive their bytes, and bytes that are not a tree are refused, whatever they are."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.tree import TreeError, clone, equal, from_bytes, leaves, map_tensors, tensor_bytes, to_bytes

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.zeros(0, dtype=dtype)
    return flat.reshape(shape)  # any bits: infinities, NaNs and negative zeros included


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
keys = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), max_size=4)
trees = st.recursive(
    st.dictionaries(keys, scalars | tensors(), max_size=4),
    lambda inner: st.dictionaries(keys, scalars | tensors() | inner, max_size=4),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=300)
def test_bytes_keep_everything(tree: dict[str, Any]) -> None:
    back = from_bytes(to_bytes(tree))
    assert equal(tree, back)
    assert [path for path, _ in leaves(back)] == [path for path, _ in leaves(tree)]  # the order, too
    assert tensor_bytes(back) == tensor_bytes(tree)


@given(trees)
@settings(max_examples=100)
def test_a_clone_is_equal_and_shares_nothing(tree: dict[str, Any]) -> None:
    copy = clone(tree)
    assert equal(tree, copy)
    held = {leaf.data_ptr() for _, leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()}
    assert not held & {leaf.data_ptr() for _, leaf in leaves(copy) if isinstance(leaf, Tensor) and leaf.numel()}


@pytest.mark.parametrize("key", ["$", "at", "is", "", "__metadata__", "tree", "é", "a.b"])
def test_keys_that_look_like_the_format_itself(key: str) -> None:
    tree = {key: {key: 1.5, "t": {key: torch.arange(3)}}}
    assert equal(tree, from_bytes(to_bytes(tree)))


def test_views_and_shared_memory_arrive_as_tensors_of_their_own() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    back = from_bytes(to_bytes({"all": base, "row": base[1], "turned": base.t()}))
    back["all"].zero_()
    assert back["row"].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert torch.equal(back["turned"], base.t())


def test_channels_last_tensors_keep_their_values() -> None:
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert torch.equal(from_bytes(to_bytes({"w": weight}))["w"], weight)


@given(st.dictionaries(keys, st.integers(0, 40), max_size=4))
def test_bytes_are_counted_as_elements_times_size(sizes: dict[str, int]) -> None:
    tree = {key: {"t": torch.zeros(size, dtype=torch.int16), "s": "not counted"} for key, size in sizes.items()}
    assert tensor_bytes(tree) == 2 * sum(sizes.values())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": torch.zeros(2)}, {"x": torch.zeros(3)}),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(2, dtype=torch.float64)}),
        ({"x": torch.zeros(1)}, {"x": -torch.zeros(1)}),
        ({"x": 1}, {"x": True}),
        ({"x": 1}, {"x": 1.0}),
        ({"x": 1}, {"y": 1}),
        ({"x": {}}, {"x": None}),
        ({"x": {"y": 1}}, {"x": {"y": 2}}),
    ],
)
def test_equal_sees_every_difference(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert not equal(a, b)
    assert equal(a, a)


def test_nan_equals_nan() -> None:
    assert equal({"x": torch.tensor([math.nan])}, {"x": torch.tensor([math.nan])})


def test_map_tensors_leaves_other_leaves_alone() -> None:
    mapped = map_tensors(lambda t: t + 1, {"a": {"t": torch.zeros(1), "n": 3}, "s": "x"})
    assert equal(mapped, {"a": {"t": torch.ones(1), "n": 3}, "s": "x"})


@pytest.mark.parametrize("value", [[1], (1,), b"x", object(), {1, 2}, torch.nn.Linear(1, 1)])
def test_values_that_are_not_leaves_are_refused(value: object) -> None:
    with pytest.raises(TreeError, match="/a/b"):
        to_bytes({"a": {"b": value}})


# bytes that are not a tree -------------------------------------------------------------------------------------------
SEED_TREE = {"a": {"t": torch.arange(4.0), "n": 3, "deep": {"u": torch.ones(2, dtype=torch.uint8)}}, "s": "x"}


def legal(tree: Any) -> bool:
    """Only what a tree may hold."""
    if isinstance(tree, dict):
        return all(isinstance(key, str) and legal(value) for key, value in tree.items())
    return tree is None or isinstance(tree, Tensor | bool | int | float | str)


def refused_or_legal(data: bytes) -> bool:
    """True when refused; anything else than a TreeError or a legal tree fails the test."""
    try:
        tree = from_bytes(data)
    except TreeError:
        return True
    assert isinstance(tree, dict) and legal(tree)
    return False


def test_thousands_of_damaged_files() -> None:
    rng, whole = random.Random(0), to_bytes(SEED_TREE)
    refused = 0
    for _ in range(6000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        refused += refused_or_legal(bytes(data))
    assert refused > 3000


def test_every_truncation_is_refused() -> None:
    whole = to_bytes(SEED_TREE)
    assert all(refused_or_legal(whole[:length]) for length in range(len(whole)))
    assert refused_or_legal(whole + b"\0")


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_random_bytes_are_refused(data: bytes) -> None:
    assert refused_or_legal(data)


def with_structure(structure: Any) -> bytes:
    return safetensors.torch.save({"/a": torch.ones(1)}, metadata={"tree": json.dumps(structure)})


@pytest.mark.parametrize(
    "structure",
    [
        [1],
        5,
        {"a": 5},
        {"a": [1]},
        {"a": {"$": "tensor"}},
        {"a": {"$": "tensor", "at": []}},
        {"a": {"$": "tensor", "at": "/missing"}},
        {"a": {"$": "scalar"}},
    ],
)
def test_structures_that_describe_no_tree_are_refused(structure: Any) -> None:
    with pytest.raises(TreeError):
        from_bytes(with_structure(structure))


@pytest.mark.parametrize(
    "structure",
    [
        {"a": {"$": "scalar", "is": [1, 2]}},
        {"a": {"$": "scalar", "is": {"q": []}}},
        {"a": {"$": "unknown", "is": 1}},
        {"a": {"$": [], "is": 1}},
    ],
)
def test_leaves_that_no_tree_holds_are_refused(structure: Any) -> None:
    with pytest.raises(TreeError):
        from_bytes(with_structure(structure))


def test_plain_safetensors_without_a_structure_are_refused() -> None:
    with pytest.raises(TreeError, match="not a tree"):
        from_bytes(safetensors.torch.save({"a": torch.ones(1)}))


def test_a_header_nested_beyond_reason_is_refused() -> None:
    deep = '{"k":' * 5000 + "{}" + "}" * 5000
    with pytest.raises(TreeError):
        from_bytes(safetensors.torch.save({}, metadata={"tree": deep}))


def test_keys_with_a_slash_do_not_hide_each_other() -> None:
    tree = {"a": {"b": torch.ones(1)}, "a/b": torch.zeros(1)}
    assert equal(tree, from_bytes(to_bytes(tree)))


@pytest.mark.parametrize(
    "tree",
    [
        {1: 2},
        {"a": {None: 2}},
        {"a": torch.ones(2, dtype=torch.complex128)},
        {"a": torch.ones(2).to_sparse()},
    ],
    ids=["integer key", "None key", "complex", "sparse"],
)
def test_what_bytes_cannot_hold_is_refused_as_a_tree_error(tree: dict[Any, Any]) -> None:
    with pytest.raises(TreeError):
        to_bytes(tree)


def test_any_text_may_be_a_key() -> None:
    tree = {"\ud800": torch.ones(1), "": {"$": torch.zeros(2)}}
    assert equal(tree, from_bytes(to_bytes(tree)))


def test_nan_scalars_are_equal_too() -> None:
    assert equal({"x": math.nan}, {"x": math.nan})
