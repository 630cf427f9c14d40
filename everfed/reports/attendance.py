"""Participation of clients in a run, late replies, and suspected shifts of their data."""

from __future__ import annotations

from dataclasses import dataclass, field

from everfed.core.spans import NAMED, spans
from everfed.reports import tables
from everfed.reports.markup import Html, join, tag
from everfed.reports.read import LoggedRun
from everfed.reports.tables import Column, ReportTable
from everfed.store.event_log import TRAIN

MOST = 200  # rounds with suspected shifts that are listed


@dataclass
class Record:
    """The rounds (from 1) of one client."""

    rounds: list[int] = field(default_factory=list)
    late: int = 0

    @property
    def longest_absence(self) -> int:
        """The most rounds between two in which it took part."""
        return max((b - a - 1 for a, b in zip(self.rounds, self.rounds[1:], strict=False)), default=0)


def records(run: LoggedRun) -> dict[int, Record]:
    """By client, of all that were sampled at least once; empty where the events do not name clients."""
    found: dict[int, Record] = {}
    for (index, phase, _), line in sorted(run.log.phases.items()):
        if phase == TRAIN:
            for client in line.clients or ():
                found.setdefault(client, Record()).rounds.append(index + 1)
            for client in line.late:
                found.setdefault(client, Record()).late += 1
    return found


def who_took_part(run: LoggedRun) -> Html:
    """A sentence on participation, with a table where clients are few; nothing where all took part in every round."""
    found, rounds = records(run), len(run.log.rounds())
    clients = max(run.log.start.clients if run.log.start else 0, len(found))
    if not found or (all(len(record.rounds) == rounds for record in found.values()) and len(found) == clients):
        return Html("")
    sentences = [f"{len(found):,} of {clients:,} clients took part in at least one of {rounds:,} rounds."]
    never = sorted(set(range(clients)) - set(found))
    if never and len(never) <= NAMED:
        sentences.append(f"Never: {spans(never)}.")
    late = sum(record.late for record in found.values())
    if late:
        sentences.append(f"{late:,} replies came too late and were dropped.")
    text = tag("p", " ".join(sentences), class_="note")
    return text if len(found) > NAMED else join(text, _table(found))


def _table(found: dict[int, Record]) -> Html:
    columns = (
        Column("Client"),
        Column("Rounds", "count"),
        Column("First"),
        Column("Last"),
        Column("Longest absence", "count"),
        Column("Too late", "count"),
    )
    rows = tuple(
        (
            str(client),
            float(len(record.rounds)),
            str(record.rounds[0]) if record.rounds else "",
            str(record.rounds[-1]) if record.rounds else "",
            float(record.longest_absence),
            float(record.late),
        )
        for client, record in sorted(found.items())
    )
    table = tables.to_html(ReportTable("who_took_part", "Who took part", columns, rows, "Rounds are counted from 1."))
    return tag("details", tag("summary", "Who took part"), table)


def suspected_shifts(run: LoggedRun) -> Html:
    """Rounds in which the drift monitor suspected that clients' data had changed; nothing where there are none."""
    found = sorted(run.log.shifts.items())
    if not found:
        return Html("")
    items = [tag("li", _suspicion(run, index, clients)) for index, clients in found[:MOST]]
    if len(found) > MOST:
        items.append(tag("li", f"and {len(found) - MOST:,} more rounds, in events.jsonl"))
    rounds = f"{len(found):,} round{'s' if len(found) > 1 else ''}"
    title = f"Suspected shifts: {sum(len(clients) for _, clients in found):,} in {rounds}"
    return tag("details", tag("summary", title), tag("ul", *items), open=len(found) <= 10)


def _suspicion(run: LoggedRun, index: int, clients: tuple[int, ...]) -> str:
    by = run.log.shifts_by[index]
    signals = "; ".join(f"{signal}: {spans(sorted(own))}" for signal, own in sorted(by.items()))
    return f"round {index + 1}: clients {spans(sorted(clients))}" + (f" (by {signals})" if set(by) != {"loss"} else "")
