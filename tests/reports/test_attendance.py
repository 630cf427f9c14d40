"""Who took part in a run, for how long they were away, whose replies came too late, and whose data may have changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everfed.reports import html
from everfed.reports.html import Record
from everfed.reports.read import LoggedRun, read_run
from tests.reports.folders import Event, create, log, phase, start


def run(folder: Path, *events: Event) -> LoggedRun:
    made = create(folder)
    log(made, [start(), *events])
    return read_run(made.path)


def cells(page: str) -> list[list[str]]:
    """The cells of every row of the page's table."""
    rows = re.findall(r"<tr>(.*?)</tr>", page.partition("<tbody>")[2])
    return [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][ >].*?</t[hd]>", row)] for row in rows]


@pytest.mark.parametrize(("rounds", "most"), [([], 0), ([4], 0), ([1, 2, 3], 0), ([1, 3, 4, 8, 9], 3)])
def test_the_longest_absence_is_the_most_rounds_between_two(rounds: list[int], most: int) -> None:
    assert Record(rounds).longest_absence == most


def test_who_took_part_by_hand(tmp_path: Path) -> None:
    """Client 0 in rounds 1, 2 and 5, client 2 in round 1 and too late in 2; clients 1 and 3 never."""
    page = html.who_took_part(
        run(
            tmp_path / "a",
            phase(0, clients=[0, 2]),
            phase(1, clients=[0], late=[2]),
            phase(2, clients=[]),
            phase(3, clients=[]),
            phase(4, clients=[0]),
            phase(4, clients=[3], name="basis"),  # does not train
        )
    )
    assert "2 of 4 clients took part in at least one of 5 rounds. Never: 1,3. 1 replies came too late" in page
    assert cells(page) == [["0", "3", "1", "5", "2", "0"], ["2", "1", "1", "1", "0", "1"]]


def test_nothing_is_reported_where_all_took_part_in_every_round(tmp_path: Path) -> None:
    assert html.who_took_part(run(tmp_path / "a", phase(0), phase(1))) == ""


def test_suspected_shifts_are_listed_by_round_and_signal(tmp_path: Path) -> None:
    signals: Event = {"event": "drift", "round": 3, "clients": [1, 2], "by": {"loss": [1], "features": [1, 2]}}
    page = html.suspected_shifts(run(tmp_path / "a", {"event": "drift", "round": 0, "clients": [2]}, signals))
    assert "Suspected shifts: 3 in 2 rounds" in page
    assert "<li>round 1: clients 2</li>" in page
    assert "<li>round 4: clients 1-2 (by features: 1-2; loss: 1)</li>" in page
