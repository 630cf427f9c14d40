"""Can forked workers train? On a machine with a GPU PyTorch's autograd starts threads at the first backward pass, and a
process forked after that refuses every backward pass. Without a GPU it has no such threads."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

Value = TypeVar("Value")


def gpu() -> bool:
    """Has this machine a device for which autograd keeps threads?"""
    return torch.accelerator.is_available()


def forks_can_train() -> bool:
    """Asked of a fork, where there is a GPU."""
    return not gpu() or in_fork(_trains)


def in_fork(work: Callable[[], Value]) -> Value:
    """What `work` returns in a forked process; its RuntimeError where it fails."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(theirs, work), daemon=True)
    process.start()
    theirs.close()
    try:
        value: Value | None
        value, problem = ours.recv()
    except EOFError:
        value, problem = None, "the process ended without an answer"
    finally:
        process.join()
        ours.close()
    if problem is not None:
        raise RuntimeError(problem)
    assert value is not None
    return value


def _answer(pipe: Connection, work: Callable[[], object]) -> None:
    answer: tuple[object, str | None]
    try:
        answer = (work(), None)
    except Exception as error:  # whatever it is belongs to the parent
        answer = (None, f"{type(error).__name__}: {error}")
    pipe.send(answer)


def _trains() -> bool:
    """Can this process run a backward pass?"""
    try:
        torch.ones((), requires_grad=True).square().backward()
    except RuntimeError:
        return False
    return True
