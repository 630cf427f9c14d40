"""A client's journal: what it remembers across processes, what it forgets, and which requests it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everfed.federation.journal import Journal, Stale

FIRST, SECOND, THIRD = (0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0)


def state(value: float) -> dict[str, dict[str, object]]:
    return {"part": {"x": torch.tensor([value])}}


def journal(folder: Path, epoch: int = 1) -> Journal:
    """Three steps, each with a state of its own and a reply that names it."""
    made = Journal(folder)
    made.accept_epoch(epoch)
    for number, place in enumerate((FIRST, SECOND, THIRD)):
        made.record(place, f"request {number}", state(float(number)), {"reply": number})
    return made


def test_a_reply_is_given_again_by_another_process(tmp_path: Path) -> None:
    journal(tmp_path)
    again = Journal(tmp_path)
    assert again.places == [FIRST, SECOND, THIRD]
    assert again.find(SECOND, "request 1") == {"reply": 1}


def test_the_step_of_the_server_s_checkpoint_may_be_asked_for_again(tmp_path: Path) -> None:
    """A server that goes on from `durable` asks for that very place: its reply stays, and so does the state before."""
    made = journal(tmp_path)
    made.forget(SECOND)
    for held in (made, Journal(tmp_path)):
        assert held.places == [FIRST, SECOND, THIRD]  # the first for its state
        assert held.find(SECOND, "request 1") == {"reply": 1}
        before = held.before(SECOND)
        assert before is not None and before["part"]["x"].tolist() == [0.0]
    made.forget(THIRD)
    assert made.places == Journal(tmp_path).places == [SECOND, THIRD]
    assert made.find(THIRD, "request 2") == {"reply": 2}


def test_a_step_that_changed_nothing_is_forgotten_and_the_state_before_it_is_not(tmp_path: Path) -> None:
    made = Journal(tmp_path)
    made.record(FIRST, "a", state(5.0), {})
    made.record(SECOND, "b", state(5.0), {})
    made.record(THIRD, "c", state(6.0), {})
    made.forget(THIRD)
    assert made.places == [FIRST, THIRD]
    before = Journal(tmp_path).before(THIRD)
    assert before is not None and before["part"]["x"].tolist() == [5.0]


def test_the_epoch_outlives_the_process(tmp_path: Path) -> None:
    made = Journal(tmp_path)
    assert made.epoch == 0
    made.accept_epoch(3)
    made.accept_epoch(3)
    again = Journal(tmp_path)
    assert again.epoch == 3
    with pytest.raises(Stale, match="of epoch 2 of the server, which is in epoch 3"):
        again.accept_epoch(2)
    assert Journal(tmp_path).epoch == 3


def test_a_new_life_of_the_server_takes_back_what_the_old_one_did(tmp_path: Path) -> None:
    journal(tmp_path, epoch=1)
    made = Journal(tmp_path)
    made.accept_epoch(2)
    assert made.find(SECOND, "another request") is None
    assert made.places == Journal(tmp_path).places == [FIRST]
    before = made.before(SECOND)
    assert before is not None and before["part"]["x"].tolist() == [0.0]


def test_a_place_that_this_life_has_passed_is_stale(tmp_path: Path) -> None:
    made = journal(tmp_path, epoch=1)
    with pytest.raises(Stale, match="was passed"):
        made.find(SECOND, "another request")
    assert made.places == [FIRST, SECOND, THIRD]
