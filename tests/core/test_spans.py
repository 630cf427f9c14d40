"""Many numbers as short text, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed.core.events import _who
from everfed.core.phase import Phase
from everfed.core.spans import NAMED, from_repeats, from_spans, repeats, spans
from everfed.core.stream import RoundPlan
from tests.support.toy import Bench, Toy


@given(st.sets(st.integers(0, 400)))
def test_spans_and_back(numbers: set[int]) -> None:
    assert from_spans(spans(sorted(numbers))) == tuple(sorted(numbers))


@given(st.lists(st.integers(0, 3)))
def test_repeats_and_back(values: list[int]) -> None:
    assert from_repeats(repeats(values)) == tuple(values)


def test_how_they_read() -> None:
    assert spans((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert repeats((0, 0, 1, 0)) == "0x2,1,0"
    assert (spans(()), repeats(())) == ("", "")


@pytest.mark.parametrize("text", ["a", "0-", "0-99999999999", "-3"])
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_spans(text)
    with pytest.raises(ValueError, match=r"."):
        from_repeats("1x99999999999")


def test_more_than_a_hundred_participants_are_named_in_the_events() -> None:
    outcome = Bench(stream=Toy(clients=120, samples=2, tasks=1, rounds_per_task=1)).run()
    event = next(event for event in outcome.events if event.get("phase") == "train")
    assert event["clients"] == "0-119"


@pytest.mark.parametrize("count", [NAMED, NAMED + 1])
def test_up_to_a_hundred_clients_are_written_out_in_an_event(count: int) -> None:
    clients = tuple(range(count))
    event = _who(Phase("train"), RoundPlan(0, clients, dict.fromkeys(clients, 0)))
    assert event == {"clients": list(clients) if count == NAMED else f"0-{NAMED}"}
