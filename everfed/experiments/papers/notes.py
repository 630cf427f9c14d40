"""What we know about a paper's experiments and no record says: notes/PAPER.toml, checked when it is read."""

from __future__ import annotations

import shlex
import tomllib
from functools import cache
from importlib import resources

from pydantic import Field, model_validator

from everfed.experiments.papers.tables import Checked


class Choice(Checked):
    """Where the paper is silent, or ours is another. why: what the paper, its code or a measurement says."""

    what: str
    ours: str
    why: str


class Planned(Checked):
    """Runs that are to be made. minutes: of one H200. table, methods, columns, seeds: of `everfed reproduce`; without a
    table `run` is the command."""

    what: str
    minutes: float
    table: str = ""
    methods: list[str] = Field(default=[])
    columns: list[str] = Field(default=[])
    seeds: int = 0
    run: str = ""

    @model_validator(mode="after")
    def _something(self) -> Planned:
        if bool(self.table) == bool(self.run) or bool(self.table) != bool(self.seeds):
            raise ValueError(f"{self.what}: name either a table and its seeds, or what to run")
        return self

    @property
    def command(self) -> str:
        chosen = {"--methods": self.methods, "--columns": self.columns}
        options = [f"{name} {shlex.quote(','.join(values))}" for name, values in chosen.items() if values]
        return self.run or " ".join(["everfed reproduce", self.table, *options, f"--seeds {self.seeds}"])


class Disagreement(Checked):
    """A result that is not the paper's. seen, ruled_out, not_tried: short sentences. next: the experiment that decides.
    predicted: what it should show. settled: what it showed and what follows, once it was run."""

    question: str
    seen: list[str]
    ruled_out: list[str] = Field(default=[])
    not_tried: list[str] = Field(default=[])
    next: str = ""
    minutes: float = 0.0
    predicted: str = ""
    settled: str = ""


class Notes(Checked):
    """answer: three sentences; {confirmed}, {claimed}, {equivalent}, {differs}, {unresolved} and {judged} are counted
    from the records. question: what is open. plot: tables that are drawn. recipes: smaller streams that have records of
    their own, with what they are. commands: how the recorded runs were made."""

    answer: list[str] = Field(min_length=3, max_length=3)
    question: str
    plot: list[str] = Field(default=[])
    choices: list[Choice] = Field(default=[])
    disagreements: list[Disagreement] = Field(default=[])
    planned: list[Planned] = Field(default=[])
    recipes: dict[str, str] = Field(default={})
    commands: list[str] = Field(default=[])

    def runs(self) -> list[Planned]:
        """All that is planned: what decides disagreements first."""
        deciding = [
            Planned(what=one.question, minutes=one.minutes, run=one.next)
            for one in self.disagreements
            if one.next and not one.settled
        ]
        return [*deciding, *self.planned]


@cache
def notes(paper: str) -> Notes:
    """Those of a paper, by its short name."""
    text = resources.files(__package__).joinpath("notes", f"{paper}.toml").read_text(encoding="utf-8")
    return Notes.model_validate(tomllib.loads(text))
