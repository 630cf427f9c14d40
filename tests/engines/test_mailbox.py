"""Trees in shared memory: what one process writes another reads, bit for bit, and copies only where asked."""

from __future__ import annotations

import json
import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.core import tree
from everfed.core.tree import Tree
from everfed.engines.mailbox import Mailbox

SMALL = 1 << 16
KINDS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits in any shape: no dimension, none of a dimension, a step between elements."""
    kind, shape = draw(st.sampled_from(KINDS)), draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(torch.Size(shape).numel())
    if kind == torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=kind).reshape(shape)
    data = draw(st.binary(min_size=count * kind.itemsize, max_size=count * kind.itemsize))
    if not count:
        return torch.empty(shape, dtype=kind)
    whole = torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)
    return whole.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else whole


LEAVES = tensors() | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
TREES = st.recursive(
    st.dictionaries(st.text(max_size=3), LEAVES, max_size=4),
    lambda inner: st.dictionaries(st.text(max_size=3), LEAVES | inner, max_size=4),
    max_leaves=12,
)


@given(TREES, st.booleans())
def test_what_is_written_is_read(written: Tree, copy: bool) -> None:
    box = Mailbox(SMALL)
    header = json.loads(json.dumps(box.write(written)))
    assert tree.equal(box.read(header, copy), written)


@given(st.lists(tensors(), min_size=1, max_size=6))
def test_tensors_are_aligned_and_do_not_overlap(written: list[torch.Tensor]) -> None:
    header = Mailbox(SMALL).write({str(i): tensor for i, tensor in enumerate(written)})
    ends = 0
    for i, tensor in enumerate(written):
        at = header[str(i)]["at"]
        assert at % 64 == 0 and at >= ends
        ends = at + tensor.numel() * tensor.element_size()


def test_views_change_with_the_next_tree_and_copies_do_not() -> None:
    box = Mailbox(SMALL)
    header = box.write({"x": torch.tensor([1.0, 2.0])})
    view, copied = box.read(header, copy=False), box.read(header, copy=True)
    box.write({"x": torch.tensor([3.0, 4.0])})
    assert view["x"].tolist() == [3.0, 4.0]
    assert copied["x"].tolist() == [1.0, 2.0]


def test_a_tensor_with_a_gradient_is_written_as_it_is() -> None:
    box = Mailbox(SMALL)
    x = torch.ones(3, requires_grad=True) * 2
    found = box.read(box.write({"x": x}), copy=True)["x"]
    assert found.tolist() == [2.0, 2.0, 2.0] and not found.requires_grad


def test_a_tree_that_does_not_fit_is_refused() -> None:
    box = Mailbox(1 << 12)
    box.write({"x": torch.zeros(1 << 10)})
    with pytest.raises(MemoryError, match="does not fit between two processes"):
        box.write({"x": torch.zeros((1 << 10) + 1)})
    with pytest.raises(MemoryError):
        box.write({"x": torch.zeros(1), "y": torch.zeros(1 << 10)})


def test_address_space_is_not_memory() -> None:
    """The default capacity is far more than a small machine has; only what is written is taken."""
    boxes = [Mailbox() for _ in range(8)]
    header = boxes[-1].write({"x": torch.arange(5)})
    assert boxes[-1].read(header, copy=True)["x"].tolist() == [0, 1, 2, 3, 4]


def _add_one(pipe: Connection, inbox: Mailbox, outbox: Mailbox) -> None:
    found = inbox.read(json.loads(pipe.recv_bytes()), copy=False)
    pipe.send_bytes(json.dumps(outbox.write({"x": found["x"] + 1, "from": os.getpid()})).encode())


def test_another_process_reads_and_answers() -> None:
    inbox, outbox = Mailbox(SMALL), Mailbox(SMALL)
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=_add_one, args=(theirs, inbox, outbox))
    worker.start()
    ours.send_bytes(json.dumps(inbox.write({"x": torch.tensor([[1, 2], [3, 4]])})).encode())
    answer = outbox.read(json.loads(ours.recv_bytes()), copy=True)
    worker.join()
    assert answer["x"].tolist() == [[2, 3], [4, 5]]
    assert answer["from"] == worker.pid != os.getpid()
