"""What is written down about the papers: the printed numbers (targets.csv), the runs that stand for their cells
(tables.toml), and what we know and no record says (notes/PAPER.toml). All of it is checked when it is read."""

from __future__ import annotations

import csv
import io
import re
import shlex
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from everfed.errors import UserError
from everfed.recipe.problems import suggestion
from everfed.recipe.schema import Logits

FILE, NUMBERS = "tables.toml", "targets.csv"
# "27.6 sec", "44.6 MB": a number and its unit. Anything else, such as "1.2*T" or "N/A", is no number to compare with.
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)(?: (sec|MB|GB))?")
_FACTORS = {"GB": 1024.0}  # sizes are kept in MB, which here means MiB: 44.6 MB is ResNet-18 with 1000 classes
# What a number is counted in. Only points are judged.
Unit = Literal["points", "per cent", "rounds", "ratio", "MiB", "cosine", "relative"]


class Checked(BaseModel):
    """A table of the file; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class TableMetric(Checked):
    """measure: a name of `measures.MEASURES`. against: the paper's method whose run of the same seed is needed, too
    (what a "ratio" is divided by; what FedSSI's Delta and RCP compare with). missing: why nothing measures it."""

    measure: str = ""
    unit: Unit = "points"
    against: str = ""
    missing: str = ""


class Stated(Checked):
    """What the paper, or its authors' code, states about the experiments of some columns; a key that is left out is
    not stated. Runs that differ in any of it are not judged.

    columns: names of data sets as targets.csv has them. dataset: everfed's name. encoder, model: a part of their
    names. images: of the training and test parts together, where they are not those of the published set. rounds: per
    task.
    """

    columns: list[str] = []
    dataset: str | None = None
    images: int | None = None
    image_size: int | None = None
    encoder: str | None = None
    model: str | None = None
    tasks: int | None = None
    clients: int | None = None
    participation: float | None = None
    rounds: int | None = None
    epochs: int | None = None


class CellGroup(Checked):
    """Cells that one recipe gives.

    dataset, setting: as targets.csv has them; without `setting` any will do. recipe: its short name. logits: which
    logits are scored, if others than the recipe's own. sets: settings on top of the recipe; sets_of_method: others
    for single methods. keys: names in the setting ("B=500") that set a key of the recipe ({B = "method.memory.size"}).
    methods: only these of the paper's.

    metrics: also cells that no number is printed for: every method with every one of these metrics, in each of
    `settings`, or after each of `tasks` tasks.
    """

    dataset: str
    recipe: str
    setting: str | None = None
    logits: Logits | None = None
    sets: list[str] = []
    sets_of_method: dict[str, list[str]] = {}
    keys: dict[str, str] = {}
    methods: list[str] | None = None
    metrics: list[str] = []
    settings: list[str] = [""]
    tasks: int = 0

    def declared(self) -> list[str]:
        """The settings of the cells in `metrics`."""
        return [f"after task {t}" for t in range(1, self.tasks + 1)] or self.settings

    def sets_of(self, setting: str) -> tuple[str, ...]:
        """All that is set on top of the recipe for a cell with this setting."""
        named = dict(part.split("=", 1) for part in setting.split(",") if "=" in part)
        return (*self.sets, *(f"{key}={named[name]}" for name, key in self.keys.items() if name in named))


class Item(Checked):
    """A table or figure. table: its name in targets.csv, if it is there. about: what it shows. each: keys that all its
    blocks share. methods, baselines: names that only this item uses, beside the paper's. A cell belongs to the first
    block that names it. states: what the paper states otherwise about this item; unstated: what it leaves open here.

    nothing: why there is nothing to run. no_target: why cells without a printed number have none. unusable: why its
    numbers must not be compared. note: what a reader of the result must know.
    """

    name: str
    about: str
    table: str = ""
    blocks: list[CellGroup] = []
    methods: dict[str, str] = {}
    baselines: dict[str, str] = {}
    states: Stated = Stated()
    unstated: list[str] = []
    nothing: str = ""
    no_target: str = "no number is printed"
    unusable: str = ""
    note: str = ""

    @model_validator(mode="before")
    @classmethod
    def _with_what_all_share(cls, table: dict[str, Any]) -> dict[str, Any]:
        shared = table.get("each", {})
        blocks = [{**shared, **block} for block in table.get("blocks", [])]
        return {key: value for key, value in table.items() if key != "each"} | {"blocks": blocks}

    @model_validator(mode="after")
    def _something_or_nothing(self) -> Item:
        if bool(self.blocks) == bool(self.nothing):
            raise ValueError(f"{self.name} needs either blocks to run or the reason why there is nothing")
        return self


class Paper(Checked):
    """name: as in targets.csv. methods: {the paper's name: everfed's}. baselines: {method: what it is compared with};
    any other method is compared with `baseline`. options: {the paper's method: settings that it needs here}. seeds: how
    many the paper's means are over. deviations: what its deviations are over; only those over seeds say how sure a mean
    is. states: what it states about its experiments, by column."""

    name: str
    title: str
    baseline: str
    methods: dict[str, str]
    metrics: dict[str, TableMetric]
    baselines: dict[str, str] = {}
    options: dict[str, list[str]] = {}
    seeds: int
    deviations: Literal["seeds", "rounds"] = "seeds"
    states: list[Stated] = []
    items: list[Item] = Field(min_length=1)


@dataclass(frozen=True)
class PrintedCell:
    """A printed cell. value, std: in the paper's unit (points, MB, s); None where there is no single number.
    text: the value as it is printed."""

    paper: str
    table: str
    dataset: str
    setting: str
    method: str
    metric: str
    value: float | None
    std: float | None
    text: str


@dataclass(frozen=True)
class PaperTable:
    """A table or figure with its paper; `key` is the paper's short name."""

    key: str
    paper: Paper
    item: Item

    @property
    def name(self) -> str:
        return f"{self.key}/{self.item.name}"

    @property
    def methods(self) -> dict[str, str]:
        """The paper's methods, with the names that only this table uses."""
        return {**self.paper.methods, **self.item.methods}

    def stated(self, dataset: str) -> Stated | None:
        """What the paper states about this column of the table, None where nothing is written down."""
        found = next((one for one in self.paper.states if dataset in one.columns), None)
        if found is None:
            return None
        changed = {**self.item.states.model_dump(exclude_none=True), **dict.fromkeys(self.item.unstated)}
        return found.model_copy(update={**changed, "columns": found.columns})

    def baseline_of(self, method: str) -> str:
        """The method that the paper's method is compared with."""
        return {**self.paper.baselines, **self.item.baselines}.get(method, self.paper.baseline)


@cache
def papers() -> dict[str, Paper]:
    """Every paper by its short name."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return {key: Paper.model_validate(table) for key, table in tomllib.loads(text).items()}


def tables() -> dict[str, PaperTable]:
    """Every table and figure by name, in the papers' order."""
    found = [PaperTable(key, paper, item) for key, paper in papers().items() for item in paper.items]
    return {table.name: table for table in found}


def find(name: str) -> PaperTable:
    """The table of that name. Raises UserError."""
    known = tables()
    if name.lower() not in known:
        hint = suggestion(name.lower(), known)
        raise UserError(f"there is no table {name!r}.{hint} `everfed reproduce --list` shows every one")
    return known[name.lower()]


@cache
def printed() -> tuple[PrintedCell, ...]:
    """Every printed cell, in the order of the file."""
    text = resources.files(__package__).joinpath(NUMBERS).read_text(encoding="utf-8")
    return tuple(_printed(row) for row in csv.DictReader(io.StringIO(text)))


def _printed(row: dict[str, str]) -> PrintedCell:
    names = {key: row[key] for key in ("paper", "table", "dataset", "setting", "method", "metric")}
    return PrintedCell(**names, value=number(row["value"]), std=number(row["std"]), text=row["value"])


def number(text: str) -> float | None:
    """The number that a cell prints, None where it prints none."""
    found = _NUMBER.fullmatch(text.strip())
    return float(found[1]) * _FACTORS.get(found[2], 1.0) if found else None


# what no record says -----------------------------------------------------------------------------------------------


class OwnChoice(Checked):
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
    choices: list[OwnChoice] = Field(default=[])
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
