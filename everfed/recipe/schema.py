"""What a recipe may say: everything that defines a run, as validated data."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from everfed.methods.registry import canonical, names

Logits = Literal["full", "seen", "task"]
# Strict: 1 is not true and "32" is not 32. A value that TOML cannot hold, or that no run can use, is refused.
_CONFIG = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class Section(BaseModel):
    """A table of the recipe; unknown keys are refused."""

    model_config = ConfigDict(**_CONFIG, extra="forbid")


class OpenSection(BaseModel):
    """A table whose further keys are checked by what they configure, which alone knows them."""

    model_config = ConfigDict(**_CONFIG, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _as_toml_has_it(cls, table: Any) -> Any:
        """Lists for tuples and no empty values, so that a recipe made in Python equals the one read back."""
        return plain(table)


def plain(value: Any) -> Any:
    """The same value in dicts and lists, without keys that hold None."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items() if entry is not None}
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def named_entries(entries: list[Any], kind: str) -> list[Any]:
    """The same list. Raises ValueError for an entry that is neither a name nor a table that has one under `kind`."""
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, dict) and isinstance(entry.get(kind), str)):
            raise ValueError(f"an entry is a {kind}'s name or a table with {kind} = NAME; got {entry!r}")
    return entries


class StreamSection(OpenSection):
    """[stream]: the keys are checked by `everfed.streams.build`, which knows the scenarios."""

    dataset: str = "digits"
    scenario: str = "domain-incremental"


class ModelSection(OpenSection):
    """[model]: kind, and the model's own options beside it."""

    kind: str = "auto"
    batchnorm: Literal["mean", "local"] = "mean"


class OptimizerGroup(Section):
    """An entry of train.optimizer.groups: parameters by patterns of their names, and what they have of their own."""

    match: list[str] = Field(min_length=1)
    lr: float | None = Field(None, ge=0)
    weight_decay: float | None = Field(None, ge=0)


class OptimizerSection(Section):
    """train.optimizer. lr: 0.1 for sgd and 0.001 for adam and adamw, where nothing is said."""

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(0.1, ge=0)
    momentum: float = Field(0.0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    schedule: Literal["constant", "linear", "exponential", "geometric", "cosine", "table"] = "constant"
    lr_end: float = Field(1e-3, gt=0)
    factors: list[Annotated[float, Field(ge=0)]] = []  # of lr, with schedule = "table"
    state: Literal["fresh", "kept", "task"] = "fresh"
    clip: float = Field(0.0, ge=0)  # of the gradient's norm; 0: none
    warmup: float = Field(0.0, ge=0)  # rounds
    by: Literal["round", "step"] = "round"  # the schedule moves with
    groups: list[OptimizerGroup] = []

    @model_validator(mode="before")
    @classmethod
    def _usual_rate(cls, table: Any) -> Any:
        adam = isinstance(table, dict) and table.get("kind") in ("adam", "adamw")
        return {"lr": 0.001, **table} if adam else table

    @model_validator(mode="after")
    def _factors_with_a_table(self) -> OptimizerSection:
        if bool(self.factors) != (self.schedule == "table"):
            raise ValueError('factors, a list of numbers, belong to schedule = "table", which needs them')
        return self


class TrainSection(Section):
    """[train]."""

    rounds_per_task: int = Field(10, ge=1)
    local_epochs: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=1)
    optimizer: OptimizerSection = OptimizerSection()
    sync_every: int = Field(1, ge=1)
    logits: Logits = "full"
    drop_last: bool = False

    @model_validator(mode="after")
    def _synchronised_at_task_ends(self) -> TrainSection:
        if self.rounds_per_task % self.sync_every:
            raise ValueError(
                f"rounds_per_task = {self.rounds_per_task} must be a multiple of sync_every = {self.sync_every}, "
                "so that what is evaluated is a synchronised model"
            )
        return self


class EvalSection(Section):
    """[eval]."""

    logits: Logits = "full"
    every: int = Field(0, ge=0)
    zero_shot: bool = False
    split: Literal["test", "validation"] = "test"
    top_k: int = Field(1, ge=1)
    metrics: list[Any] = []  # further ones: names, package.module:Name, or tables {metric = NAME, option = value}
    snapshots: bool = False  # keep the model at the end of every task

    @field_validator("metrics")
    @classmethod
    def _names_or_tables(cls, metrics: list[Any]) -> list[Any]:
        return named_entries(metrics, "metric")


class MethodSection(OpenSection):
    """[method]: a preset's name or a list of parts; any other table holds the options of the part it names.

    defaults: options by part that serve whichever method is chosen, where it has that part.
    """

    name: str = ""
    parts: list[Any] | None = None
    weighting: Literal["uniform", "samples"] = "uniform"
    defaults: dict[str, dict[str, Any]] = {}

    @field_validator("name")
    @classmethod
    def _as_presets_have_it(cls, name: str) -> str:
        return canonical(name)

    @field_validator("parts")
    @classmethod
    def _names_or_tables(cls, parts: list[Any] | None) -> list[Any] | None:
        return parts if parts is None else named_entries(parts, "part")

    @model_validator(mode="after")
    def _named_or_composed(self) -> MethodSection:
        if not self.name and not self.parts:
            raise ValueError("needs a name (see `everfed list methods`) or a list of parts")
        return self


class EngineSection(Section):
    """[engine]: how clients are run; changes speed, not results (beyond a GPU's rounding)."""

    kind: Literal["auto", "eager", "processes", "graphs", "ranks"] = "auto"
    device: str = "auto"
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    memory_format: Literal["auto", "contiguous", "channels-last"] = "auto"
    workers: int = Field(0, ge=0)  # processes: 0 = one per core
    slots: int = Field(0, ge=0)  # graphs: 0 = chosen from memory and throughput
    compile: bool = False
    state_memory: float = Field(0.0, ge=0)  # GiB of client state kept in memory, the rest on disk; 0 = by the device

    @property
    def leads(self) -> bool:
        """Does this process own the run folder? Of the processes that torchrun starts, the first does."""
        return self.kind != "ranks" or os.environ.get("RANK", "0") == "0"


class DifferentialPrivacySection(Section):
    """[privacy.dp]: replies are clipped to an L2 norm of `clip` and hidden by noise of standard deviation noise x clip,
    on the server ("central") or by each client ("local"). delta: at which epsilon is reported; budget: the epsilon at
    which the run stops (0: it does not); seed: makes the noise repeatable, for simulations (-1: a secret key)."""

    kind: Literal["central", "local"] = "central"
    noise: float = Field(1.0, gt=0)
    clip: float = Field(1.0, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    budget: float = Field(0.0, ge=0)
    seed: int = Field(-1, ge=-1)


class PrivacySection(Section):
    """[privacy]: protections around whatever method runs. secure_aggregation: the server learns sums only. threshold:
    the share of a phase's clients that must stay to its end. clip, bits: floats are clipped to [-clip, clip] and sent
    in steps of 2 clip / 2^bits."""

    secure_aggregation: bool = False
    threshold: float = Field(2 / 3, gt=0.5, le=1)
    clip: float = Field(16.0, gt=0)
    bits: int = Field(24, ge=8, le=28)
    dp: DifferentialPrivacySection | None = None


class MonitorSection(Section):
    """[monitor]: reports where clients' data seems to have changed, and changes no number. watch: from their losses,
    from the features of up to `samples` of their samples, or from both."""

    kind: Literal["none", "page-hinkley"] = "none"
    watch: Literal["loss", "features", "both"] = "loss"
    samples: int = Field(64, ge=2)
    delta: float = Field(0.1, ge=0)
    threshold: float = Field(0.5, gt=0)
    window: int = Field(5, ge=1)
    warmup: int = Field(2, ge=1)


class FederationSection(Section):
    """[federation]: what a run on real clients waits for; a simulation ignores it.

    deadline: seconds after which a phase goes on without the clients that have not answered, 0 for never; deadlines:
    the same for single phases, by name. minimum: a phase never ends with fewer answers (0: everybody's, or one where
    there is a deadline). enough: the share of answers that ends a phase at once, for plans that over-select.
    retry: seconds before a client that failed is asked again, doubled up to longest_retry. silence: seconds after which
    one that is connected but does not answer is asked again, doubled each time. tries: how often one whose own code
    fails is asked in a phase before it counts as absent, 0 for ever.
    outlier: a value that is added up and more than so many times as long as the median client's is refused, 0 for
    never; of a model it is the way from the one that was sent.
    samples: as how many samples a client, by its name, counts at most with weighting = "samples".
    """

    deadline: float = Field(0.0, ge=0)
    deadlines: dict[str, float] = {}
    minimum: int = Field(0, ge=0)
    enough: float = Field(1.0, gt=0, le=1)
    retry: float = Field(1.0, ge=0)
    longest_retry: float = Field(30.0, ge=0)
    silence: float = Field(120.0, gt=0)
    tries: int = Field(10, ge=0)
    outlier: float = Field(1000.0, ge=0)
    samples: dict[str, Annotated[int, Field(ge=0)]] = {}


class CompareSection(Section):
    """[compare]: what `everfed compare RECIPE` compares when the command line does not say.

    options: {method: settings that it alone is run with, as `--set` takes them}.
    """

    methods: list[str] = []  # none: those of the command line
    seeds: list[Annotated[int, Field(ge=0)]] = Field([0], min_length=1)
    options: dict[str, list[str]] = {}

    @model_validator(mode="after")
    def _options_of_its_methods(self) -> CompareSection:
        for method, settings in self.options.items():
            if self.methods and method not in self.methods:
                raise ValueError(f"options.{method}: not among methods = {self.methods}")
            for entry in settings:
                if "=" not in entry:
                    raise ValueError(f"options.{method}: write settings as key=value; got {entry!r}")
        return self


class Recipe(Section):
    """A whole recipe. `seed` drives the run; the stream may have its own (stream.seed)."""

    name: str = Field("recipe", min_length=1)
    seed: int = Field(0, ge=0)
    stream: StreamSection = StreamSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    method: MethodSection
    engine: EngineSection = EngineSection()
    privacy: PrivacySection = PrivacySection()
    monitor: MonitorSection = MonitorSection()
    federation: FederationSection = FederationSection()
    compare: CompareSection | None = None
    methods: dict[str, MethodSection] | None = None  # of one's own: [methods.NAME] with parts, chosen by method.name

    @field_validator("methods")
    @classmethod
    def _names_of_ones_own(cls, methods: dict[str, MethodSection] | None) -> dict[str, MethodSection] | None:
        for name, section in (methods or {}).items():
            if name in names() or not re.fullmatch(r"[\w.+-]+", name):
                why = "is the name of a shipped method" if name in names() else "has signs that no folder should have"
                raise ValueError(f"{name!r} {why}; choose another, such as my-{re.sub(r'[^a-z]+', '-', name.lower())}")
            if not section.parts:
                raise ValueError(f"{name!r} needs parts, such as parts = ['fedavg', 'my_part:Clip']")
        return methods
