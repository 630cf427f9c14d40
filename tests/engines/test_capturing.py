"""While one slot's steps are recorded, no other slot's thread works; nobody waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from everfed.engines.capture_thread import Capturing
from tests.support.waiting import HANG

SLOTS, STEPS = 4, 60


class Slots:
    """Threads that make steps, and now and then capture. at_work: those in the middle of a step."""

    def __init__(self) -> None:
        self.capturing = Capturing()
        self.at_work: set[int] = set()
        self.recorded: list[tuple[str, set[int]]] = []

    def client(self, slot: int, capture_at: set[int]) -> int:
        with self.capturing.working():
            for step in range(STEPS):
                self.capturing.pause()
                if step in capture_at:
                    self.capturing.run(self.record)
                self.at_work.add(slot)
                time.sleep(0.0002)
                self.at_work.discard(slot)
        return slot

    def record(self) -> None:
        with self.capturing.alone():
            before = set(self.at_work)
            time.sleep(0.002)
            self.recorded.append((threading.current_thread().name, before | self.at_work))


def test_no_slot_works_while_another_ones_steps_are_recorded() -> None:
    slots = Slots()
    with ThreadPoolExecutor(SLOTS) as pool:
        done = list(pool.map(lambda slot: slots.client(slot, {0, 7 * slot, 30}), range(SLOTS), timeout=HANG))
    assert done == list(range(SLOTS))
    assert len(slots.recorded) == 3 * SLOTS - 1  # 7 x 0 is 0
    assert all(not others for _, others in slots.recorded)
    assert {name for name, _ in slots.recorded} == {"capture_0"}
    slots.capturing.close()


def test_an_error_of_a_capture_reaches_its_slot_and_the_others_go_on() -> None:
    capturing = Capturing()

    def fail() -> None:
        with capturing.alone():
            raise ValueError("no memory")

    with capturing.working(), pytest.raises(ValueError, match="no memory"):
        capturing.run(fail)
    with ThreadPoolExecutor(1) as pool:

        def work() -> bool:
            with capturing.working():
                capturing.pause()
                return True

        assert pool.submit(work).result(timeout=HANG)
    assert not capturing.wanted


def test_a_thread_that_does_not_work_on_a_slot_may_capture_too() -> None:
    capturing = Capturing()
    assert capturing.run(lambda: threading.current_thread().name) == "capture_0"
    capturing.pause()
    capturing.close()
