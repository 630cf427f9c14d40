"""Bytes made to do harm: poisoned headers, and a byte-level fuzzer. Refused as TreeError, in bounded memory."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everfed.core import tree
from everfed.core.tree import TreeError, from_bytes, to_bytes

ONE = json.dumps({"a": {"$": "tensor", "at": "0"}})
SAMPLE = {"a": {"t": torch.arange(6.0).reshape(2, 3), "n": -3, "b": torch.tensor([True, False])}, "s": "x", "e": {}}


def raw(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def one_tensor(dtype: str, shape: list[int], body: bytes, end: int | None = None, structure: str = ONE) -> bytes:
    offsets = [0, len(body) if end is None else end]
    return raw(
        {"__metadata__": {"tree": structure}, "0": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, body
    )


POISONED = {
    "a header of terabytes": struct.pack("<Q", 2**42) + b"{}",
    "a length beyond every integer": b"\xff" * 8 + b"{}",
    "a tensor of terabytes": one_tensor("F32", [2**40], b"", end=2**42),
    "more elements than bytes": one_tensor("F32", [1000], b"\0" * 4),
    "a size that overflows": one_tensor("F32", [2**62, 2**62], b"\0" * 4),
    "an empty tensor with a side no integer holds": one_tensor("F32", [0, 2**63], b""),
    "a negative side": one_tensor("F32", [-1], b"\0" * 4),
    "offsets that run backwards": raw(
        {"__metadata__": {"tree": ONE}, "0": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"\0" * 4
    ),
    "five thousand dimensions": one_tensor("F32", [1] * 5000, b"\0" * 4),
    "an unknown dtype": one_tensor("F1024", [1], b"\0" * 128),
    "a dtype torch has not": one_tensor("F4", [2], b"\1"),
    "a bool of seven": one_tensor("BOOL", [1], b"\7"),
    "a bool of two": one_tensor("BOOL", [1], b"\2"),
    "one tensor at two places": one_tensor(
        "F32", [1], b"\0" * 4, structure=json.dumps({k: {"$": "tensor", "at": "0"} for k in "ab"})
    ),
    "a tensor at no place": one_tensor("F32", [1], b"\0" * 4, structure="{}"),
    "an integer of five thousand digits": raw(
        {"__metadata__": {"tree": '{"a":{"$":"scalar","is":' + "9" * 5000 + "}}"}}
    ),
    "a header that is a list": raw([1]),
    "no metadata": raw({}),
    "metadata that is a number": raw({"__metadata__": 5}),
    "not UTF-8": raw(b'{"\xff\xfe":1}'),
    "overlapping tensors": raw(
        {
            "__metadata__": {"tree": ONE},
            "0": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "1": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        },
        b"\0" * 4,
    ),
    "a header nested beyond reason": raw(b'{"__metadata__":' + b'{"k":' * 20000 + b"1" + b"}" * 20001),
    "a structure nested beyond reason": raw({"__metadata__": {"tree": '{"k":' * 20000 + "{}" + "}" * 20000}}),
}


@pytest.mark.parametrize("data", POISONED.values(), ids=POISONED)
def test_poisoned_headers_are_refused_in_bounded_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TreeError):
            from_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 200 * len(data) + (4 << 20)
    finally:
        tracemalloc.stop()


def test_a_long_header_of_a_stranger_is_not_even_parsed() -> None:
    data = to_bytes({str(i): i for i in range(2000)})
    assert len(from_bytes(data)) == 2000
    with pytest.raises(TreeError, match="a header of"):
        from_bytes(data, header_limit=10_000)


def harmless(data: bytes) -> bool:
    """Refused (False), or a tree whose every leaf can be used, printed and sent on (True)."""
    try:
        found = from_bytes(data)
    except TreeError:
        return False
    for _, leaf in tree.leaves(found):
        if isinstance(leaf, Tensor) and leaf.numel():
            leaf.clone().reshape(-1).view(torch.uint8).sum()
    assert tree.equal(found, from_bytes(to_bytes(found)))
    return True


def mutated(rng: random.Random, data: bytes) -> bytes:
    """One to five of the things that byte-level fuzzers do."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 5)):
        at, kind = rng.randrange(len(out) + 1), rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.choice(b'\0\xff{}[]",:0-9')
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 3:
            del out[at : at + rng.randint(1, 8)]
        elif kind == 4:
            end = at + rng.randint(1, 16)
            out[at:at] = out[at:end]
        elif kind == 5:
            out[:8] = struct.pack("<Q", rng.choice([0, 1, len(out), len(out) - 8, 2**31, 2**63, 2**64 - 1]))
        else:
            digits = [i for i, byte in enumerate(out) if 48 <= byte <= 57] or [0]
            out[rng.choice(digits) : rng.choice(digits)] = str(rng.choice([-1, 2**31, 2**63, 2**64, 10**30])).encode()
        if not out:
            return b""
    return bytes(out)


def test_a_byte_level_fuzzer_finds_nothing() -> None:
    rng, whole = random.Random(1), to_bytes(SAMPLE)
    outcomes = [harmless(mutated(rng, whole)) for _ in range(8000)]
    assert not all(outcomes) and any(outcomes)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
infos = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "U8", "BOOL", "C64", "F8_E4M3", "F4", "?"]),
        "shape": st.lists(st.integers(-1, 4) | st.sampled_from([2**31, 2**62, 2**63, 2**64]), max_size=4),
        "data_offsets": st.lists(st.integers(-1, 20) | st.just(2**60), min_size=2, max_size=2),
    }
)


@given(
    st.dictionaries(st.sampled_from(["0", "1", "/a"]), infos | json_values, max_size=3),
    json_values,
    st.binary(max_size=24),
)
@settings(max_examples=200, deadline=None)
def test_headers_of_any_json(tensors: dict[str, Any], structure: Any, body: bytes) -> None:
    harmless(raw({"__metadata__": {"tree": json.dumps(structure)}, **tensors}, body))


structures = st.recursive(
    st.sampled_from([{"$": "tensor", "at": "0"}, {"$": "tensor", "at": 0}, {"$": "scalar", "is": 1}, {"$": "tensor"}]),
    lambda inner: st.dictionaries(st.sampled_from(["a", "$", "at", "is"]), inner | json_values, max_size=3),
    max_leaves=5,
)


@given(structures)
@settings(max_examples=200, deadline=None)
def test_structures_of_any_form(structure: Any) -> None:
    harmless(one_tensor("F32", [1], b"\0" * 4, structure=json.dumps(structure)))
