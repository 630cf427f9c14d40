"""What is special about forked workers.

Can they train? On a machine with a GPU PyTorch's autograd starts threads at the first backward pass, and a process
forked after that refuses every backward pass. Without a GPU it has no such threads.

And a ctrl-C during a fork must not be lost.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

Value = TypeVar("Value")


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Around the start of a worker: a ctrl-C takes effect afterwards. Python drops what the hooks around a fork
    (logging's, say) raise, a KeyboardInterrupt too. And it reaches all processes of a terminal: the worker is born with
    it blocked, until it ignores it.

    Blocking alone would not do: another thread, such as one of OpenMP's, takes the signal, and Python calls the handler
    in the main thread, wherever that is."""
    arrived: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and before is not None  # None: not set by Python
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if ours:
            signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if ours:
            signal.signal(signal.SIGINT, before)
        if arrived:
            signal.raise_signal(signal.SIGINT)


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
