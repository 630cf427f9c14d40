"""What ranks give each other: a tree as a note and its tensors, in order."""

from __future__ import annotations

import json

import torch

from everfed.core import tree
from everfed.engines.group import _as_bytes, _tensors, describe, rebuild


def test_a_tree_is_the_same_from_its_note_and_its_bytes() -> None:
    given = {
        "teacher": {"params": torch.randn(7), "counters": torch.tensor([3])},
        "known": torch.tensor([True, False]),
        "best": torch.tensor(float("inf")),
        "pool": torch.zeros(0, 3, dtype=torch.uint8),
        "low": torch.randn(2, 3, dtype=torch.bfloat16),
        "host": {"since": 4, "lowest": float("inf"), "name": "a", "none": None, "empty": {}},
    }
    sent = iter([_as_bytes(tensor).clone() for tensor in _tensors(given)])

    def take(shape: list[int], dtype: torch.dtype, on_device: bool) -> torch.Tensor:
        assert not on_device
        tensor = torch.empty(shape, dtype=dtype)
        _as_bytes(tensor).copy_(next(sent))
        return tensor

    assert tree.equal(rebuild(json.loads(json.dumps(describe(given))), take), given)
    assert next(sent, None) is None
