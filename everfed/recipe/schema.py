"""What a recipe may say: everything that defines a run, as validated data."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from everfed.core import option
from everfed.core.option import Logits as Logits
from everfed.core.option import Option, declared_options
from everfed.methods.registry import canonical, names

Kind = TypeVar("Kind")
# Strict: 1 is not true and "32" is not 32. A value that TOML cannot hold, or that no run can use, is refused.
_CONFIG = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


class Section(BaseModel):
    """A table of the recipe; unknown keys are refused."""

    model_config = ConfigDict(**_CONFIG, extra="forbid")

    def as_options(self, kind: type[Kind], **further: Any) -> Kind:
        """The dataclass made from the keys that it has in common with the table, and from `further`."""
        common = {name for name, _ in declared_options(kind)} - further.keys()
        return kind(**self.model_dump(include=common), **further)


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


def section_of(options: Any, *left_out: str, **own: tuple[Any, Any]) -> Any:
    """A section with the options of a dataclass: their names, types, defaults and bounds, and relations between them,
    which the dataclass itself checks. own: further keys, or others, as (type, default)."""
    hints = get_type_hints(options, localns={"Optimizer": option.OptimizerOptions})
    keys: dict[str, Any] = own | {
        name: _key(hints[name], options.__dataclass_fields__[name], declared)
        for name, declared in declared_options(options)
        if name not in (*left_out, *own)
    }

    def related(made: Any) -> Any:
        try:
            made.as_options(options)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(options.option_prefix)) from error
        return made

    checks: Any = {"related": model_validator(mode="after")(related)} if "__post_init__" in vars(options) else {}
    return create_model(options.__name__, __base__=Section, __validators__=checks, **keys)


def _key(hint: Any, field: dataclasses.Field[Any], declared: Option) -> tuple[Any, Any]:
    """The type and the field of a key."""
    given = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    default = ... if given is dataclasses.MISSING else list(given) if isinstance(given, tuple) else given
    bounds = {"ge": declared.at_least, "gt": declared.above, "le": declared.at_most, "lt": declared.below}
    checked: Any = {word: bound for word, bound in bounds.items() if bound is not None}
    return _type(hint, declared), Field(default, **checked)


def _type(hint: Any, declared: Option) -> Any:
    """As TOML has it."""
    if declared.one_of:
        return Literal[declared.one_of]
    if get_origin(hint) is Sequence:
        return list[_type(get_args(hint)[0], Option())]  # type: ignore[misc]
    if get_origin(hint) is Mapping:
        return dict[get_args(hint)]  # type: ignore[misc]
    return section_of(hint) if dataclasses.is_dataclass(hint) else hint


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
    batchnorm: option.Statistics = "mean"


_Optimizer: Any = section_of(option.OptimizerOptions)


class OptimizerSection(_Optimizer):
    """train.optimizer. lr: 0.1 for sgd and 0.001 for adam and adamw, where nothing is said."""

    @model_validator(mode="before")
    @classmethod
    def _usual_rate(cls, table: Any) -> Any:
        adam = isinstance(table, dict) and table.get("kind") in ("adam", "adamw")
        return {"lr": 0.001, **table} if adam else table


_Train: Any = section_of(
    option.TrainOptions,
    "batchnorm",  # model.batchnorm
    rounds_per_task=(int, Field(10, ge=1)),
    optimizer=(OptimizerSection, OptimizerSection()),
)


class TrainSection(_Train):
    """[train]."""

    @model_validator(mode="after")
    def _synchronised_at_task_ends(self) -> TrainSection:
        if self.rounds_per_task % self.sync_every:
            raise ValueError(
                f"rounds_per_task = {self.rounds_per_task} must be a multiple of sync_every = {self.sync_every}, "
                "so that what is evaluated is a synchronised model"
            )
        return self


_Eval: Any = section_of(option.EvalOptions)


class EvalSection(_Eval):
    """[eval]."""

    metrics: list[Any] = Field([])  # names, package.module:Name, or tables {metric = NAME, option = value}
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


_Noise: Any = section_of(option.NoiseOptions)
_Sums: Any = section_of(option.SumOptions, secure_aggregation=(bool, False))


class DifferentialPrivacySection(_Noise):
    """[privacy.dp]: replies are clipped to an L2 norm of `clip` and hidden by noise of standard deviation noise x clip,
    on the server ("central") or by each client ("local")."""


class PrivacySection(_Sums):
    """[privacy]: protections around whatever method runs. secure_aggregation: the server learns sums only."""

    dp: DifferentialPrivacySection | None = None


_Monitor: Any = section_of(option.MonitorOptions)
_Wait: Any = section_of(option.WaitOptions)


class MonitorSection(_Monitor):
    """[monitor]: reports where clients' data seems to have changed, and changes no number."""


class FederationSection(_Wait):
    """[federation]: what a run on real clients waits for; a simulation ignores it.

    outlier: a value that is added up and more than so many times as long as the median client's is refused, 0 for
    never; of a model it is the way from the one that was sent.
    samples: as how many samples a client, by its name, counts at most with weighting = "samples".
    """

    outlier: float = Field(1000.0, ge=0)
    samples: dict[str, Annotated[int, Field(ge=0)]] = Field({})


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
