"""A recipe: everything that defines a run, as validated data."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Logits = Literal["full", "seen", "task"]


class Section(BaseModel):
    """A table of the recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamSection(BaseModel):
    """[stream]: the keys are checked by `everfed.streams.build`, which knows the scenarios."""

    model_config = ConfigDict(extra="allow", frozen=True)

    dataset: str = "digits"
    scenario: str = "domain-incremental"


class ModelSection(BaseModel):
    """[model]: kind, and the model's own options beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str = "small-cnn"
    batchnorm: Literal["mean", "local"] = "mean"


class OptimizerSection(Section):
    """train.optimizer."""

    kind: Literal["sgd", "adam"] = "sgd"
    lr: float = Field(0.01, ge=0)
    momentum: float = Field(0.0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    schedule: Literal["constant", "linear", "exponential"] = "constant"
    lr_end: float = Field(1e-3, gt=0)
    state: Literal["fresh", "kept"] = "fresh"


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


class MethodSection(BaseModel):
    """[method]: a preset's name or a list of parts; any other table holds the options of the part it names."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = ""
    parts: list[str | dict[str, Any]] | None = None
    weighting: Literal["uniform", "samples"] = "uniform"

    @model_validator(mode="after")
    def _named_or_composed(self) -> MethodSection:
        if not self.name and not self.parts:
            raise ValueError("method needs a name (see `everfed list methods`) or a list of parts")
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
    state_memory: float = Field(2.0, gt=0)  # GiB of client state kept in memory; the rest is paged to disk


class Recipe(Section):
    """A whole recipe. `seed` drives the run; the stream may have its own (stream.seed)."""

    name: str = "recipe"
    seed: int = Field(0, ge=0)
    stream: StreamSection = StreamSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    method: MethodSection
    engine: EngineSection = EngineSection()
