"""Trees survive their bytes, and bytes that are not a tree are refused, whatever they are."""

from __future__ import annotations

import json
import math
import random
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.tree import (
    TreeError,
    clone,
    equal,
    from_bytes,
    leaves,
    map_tensors,
    tensor_bytes,
    to_bytes,
    to_chunks,
)

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


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


# chunks --------------------------------------------------------------------------------------------------------------
@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Not contiguous, or inside of a larger tensor."""
    tensor = draw(tensors())
    kind = draw(st.sampled_from(["turned", "strided", "expanded", "tail"]))
    if kind == "turned":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if kind == "expanded":
        return tensor.expand(2, *tensor.shape)
    return tensor.reshape(-1)[::2] if kind == "strided" else tensor.reshape(-1)[1:]


def tensors_of(tree: dict[str, Any]) -> list[Tensor]:
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def header_of(data: bytes) -> dict[str, Any]:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def address(chunk: Any) -> int:
    return np.frombuffer(chunk, np.uint8).ctypes.data


@given(trees, st.lists(views(), max_size=3))
@settings(max_examples=300)
def test_chunks_are_the_file_that_safetensors_writes(tree: dict[str, Any], more: list[Tensor]) -> None:
    tree = {"tree": tree, "again": tree, "views": {str(i): view for i, view in enumerate(more)}}
    data = b"".join(to_chunks(tree))
    own = {str(i): tensor.clone(memory_format=torch.contiguous_format) for i, tensor in enumerate(tensors_of(tree))}
    metadata = header_of(data)["__metadata__"]
    assert data == to_bytes(tree) == safetensors.torch.save(own, metadata=metadata)
    assert equal(own, safetensors.torch.load(data)) and equal(tree, from_bytes(data))


@pytest.mark.parametrize(
    "single", [torch.arange(3.0)[1::2], torch.arange(4).reshape(2, 2).t()[:1, 1:], torch.ones(1, 0)]
)
def test_a_single_element_of_a_view_is_written_and_compared(single: Tensor) -> None:
    """Torch calls it contiguous whatever its strides are."""
    assert equal(from_bytes(to_bytes({"x": single})), {"x": single}) and not equal({"x": single}, {"x": single[None]})


def test_files_of_chunks_are_opened_by_safetensors(tmp_path: Path) -> None:
    tree = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor(True), "c": torch.zeros(0, 3), "n": 1.5}
    with open(tmp_path / "file", "wb") as file:
        file.writelines(to_chunks(tree))
    with safetensors.safe_open(tmp_path / "file", "pt") as opened:
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert equal(found, {str(i): tensor.contiguous() for i, tensor in enumerate(tensors_of(tree))})


@given(trees)
def test_every_tensor_is_aligned_in_its_file(tree: dict[str, Any]) -> None:
    data = to_bytes(tree)
    header = header_of(data)
    starts = [header[str(i)]["data_offsets"][0] for i in range(len(tensors_of(tree)))]
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert all(start % tensor.element_size() == 0 for start, tensor in zip(starts, tensors_of(tree), strict=True))


def test_chunks_are_the_memory_of_the_tensors_themselves() -> None:
    base = torch.arange(10.0)
    tree = {"a": base, "shared": base[2:7], "deep": {"b": torch.arange(3), "c": torch.nn.Parameter(torch.ones(2, 2))}}
    _, *bodies = to_chunks(tree)
    order = [tree["deep"]["b"], tree["a"], tree["shared"], tree["deep"]["c"]]  # larger elements first
    assert [address(body) for body in bodies] == [tensor.data_ptr() for tensor in order]
    assert all(isinstance(body, memoryview) and body.readonly for body in bodies)


def test_what_must_be_copied_is_copied_when_it_is_reached() -> None:
    turned = {str(i): torch.arange(12.0).reshape(3, 4).t() for i in range(4)}
    chunks, copies = to_chunks(turned), []
    next(chunks)
    for chunk in chunks:
        copies.append(weakref.ref(chunk.obj))
        del chunk
        assert [copy() for copy in copies] == [None] * len(copies)
    assert len(copies) == 4


def test_a_tree_without_bytes_is_refused_before_its_first_chunk() -> None:
    for bad in (torch.ones(1, dtype=torch.complex128), torch.ones(1, device="meta"), torch.ones(1).to_sparse(), [1]):
        with pytest.raises(TreeError, match="/a/bad"):
            to_chunks({"a": {"good": torch.ones(1), "bad": bad}})


def test_a_tree_nested_beyond_reason_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    with pytest.raises(TreeError, match="no bytes"):
        to_bytes(circle)


def test_conjugate_and_negative_views_are_written_as_what_they_stand_for() -> None:
    plain = torch.complex(torch.arange(3.0), torch.ones(3))
    back = from_bytes(to_bytes({"conjugate": plain.conj(), "negative": torch._neg_view(torch.ones(2))}))
    assert back["conjugate"].tolist() == [-1j, 1 - 1j, 2 - 1j] and back["negative"].tolist() == [-1.0, -1.0]


def test_numbers_are_little_endian_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a big-endian machine every number is turned around, a complex one in two halves."""
    tree = {"f": torch.tensor([1.5, -2.0]), "c": torch.tensor([1 + 2j]), "i": torch.tensor(258), "b": torch.ones(2) > 0}
    monkeypatch.setattr(sys, "byteorder", "big")
    _, *bodies = to_chunks(tree)
    expected = [
        np.array([258], ">i8").tobytes(),
        np.array([1, 2], ">f4").tobytes(),
        np.array([1.5, -2], ">f4").tobytes(),
        b"\1\1",
    ]
    assert [bytes(body) for body in bodies] == expected


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
