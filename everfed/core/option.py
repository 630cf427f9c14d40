"""Options, declared once: default, bounds and meaning. The declaration makes the field, its check, the error, the line
in `everfed show`, the row in the document and the recipe's key. Below are those of a run beside its stream, model and
method: the tables of a recipe have their keys from these classes, and what runs takes them as they are. No torch here.

    @dataclass(frozen=True)
    class FedProx(Part):
        mu: float = option(0.01, at_least=0, about="weight of (mu/2) ||w - w_global||^2")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

if TYPE_CHECKING:
    from everfed.core.optimizer import Optimizer

_KEY = "everfed.option"


@dataclass(frozen=True)
class Option:
    """What an option may be. A value of None stands for a default that is chosen later, and is not checked."""

    about: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    one_of: tuple[Any, ...] = ()

    def problem(self, value: Any) -> str:
        """Why this value is refused; "" if it is not."""
        if self.one_of:
            wrong = f"must be one of {', '.join(map(str, self.one_of))}" if value not in self.one_of else ""
        elif value is None:
            return ""
        elif self.at_least is not None and not value >= self.at_least:
            wrong = f"must be at least {self.at_least:g}"
        elif self.above is not None and not value > self.above:
            wrong = "must be positive" if self.above == 0 else f"must be above {self.above:g}"
        elif self.at_most is not None and not value <= self.at_most:
            wrong = f"must be at most {self.at_most:g}"
        elif self.below is not None and not value < self.below:
            wrong = f"must be below {self.below:g}"
        else:
            return ""
        return wrong and f"{wrong}; got {value!r}"

    @property
    def allowed(self) -> str:
        """The allowed values in words, for `show` and the documents; "" where all are."""
        if self.one_of:
            return f"one of {', '.join(map(str, self.one_of))}"
        bounds = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below))
        return ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def option(
    default: Any = MISSING,
    *,
    make: Callable[[], Any] | None = None,
    about: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    one_of: Sequence[Any] = (),
    hash: bool | None = None,
) -> Any:
    """A dataclass field with its bounds. make: makes the default, where it cannot be shared. hash: False for tables."""
    declared = Option(about, at_least, above, at_most, below, tuple(one_of))
    defaults: dict[str, Any] = {"default": default} if make is None else {"default_factory": make}
    return field(**defaults, hash=hash, metadata={_KEY: declared})


class HasOptions:
    """Base of dataclasses with options: what is out of bounds is refused when one is made. Lists become tuples.
    option_prefix: what its options' names begin with in an error."""

    option_prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            declared = entry.metadata.get(_KEY)
            if declared is None:
                continue
            if isinstance(getattr(self, entry.name), list):
                object.__setattr__(self, entry.name, tuple(getattr(self, entry.name)))
            problem = declared.problem(getattr(self, entry.name))
            if problem:
                raise ValueError(f"{self.option_prefix}{entry.name} {problem}")


def declared_options(kind: type) -> Iterator[tuple[str, Option]]:
    """The options of a dataclass by name; a plain field is one without bounds."""
    for entry in fields(kind):
        yield entry.name, entry.metadata.get(_KEY, Option())


Logits = Literal["full", "seen", "task"]
RULES: tuple[str, ...] = get_args(Logits)
Statistics = Literal["mean", "local"]  # of BatchNorm: averaged, or staying with each client


# [train] --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ParameterGroup(HasOptions):
    """Parameters with a rate or a weight decay of their own; None: the optimiser's."""

    match: Sequence[str] = option(about="patterns of the parameters' names")
    lr: float | None = option(None, at_least=0, about="the group's own rate")
    weight_decay: float | None = option(None, at_least=0, about="the group's own weight decay")

    option_prefix = "optimizer.groups."

    def owns(self, parameter: str) -> bool:
        return any(fnmatchcase(parameter, pattern) for pattern in self.match)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.match or not all(isinstance(pattern, str) for pattern in self.match):
            raise ValueError(f"optimizer.groups.match must be a list of patterns; got {list(self.match)}")


@dataclass(frozen=True)
class OptimizerOptions(HasOptions):
    """schedule: how lr moves over the rounds of a task: constant; linear, from lr towards 0
    (round i of R uses lr * (1 - i/R)); exponential, from lr at the first round to lr_end at the last; geometric
    and cosine, from lr to lr_end, which they would reach in round R; table, lr times the `factors`, which share the
    rounds of a task evenly among them: the last round always has the last one.
    state: "fresh" starts anew every round, "kept" carries momentum and moments from round to round on the client,
    "task" does so within a task.
    """

    kind: str = option("sgd", one_of=("sgd", "adam", "adamw"), about="adamw: weight decay is not part of the gradient")
    lr: float = option(0.1, at_least=0, about="learning rate; in a recipe 0.001 for adam and adamw")
    momentum: float = option(0.0, at_least=0, about="of sgd")
    weight_decay: float = option(0.0, at_least=0, about="weight of the parameters' L2 penalty")
    beta1: float = option(0.9, at_least=0, below=1, about="of adam: how much of the first moment stays")
    beta2: float = option(0.999, at_least=0, below=1, about="of adam: how much of the second moment stays")
    eps: float = option(1e-8, above=0, about="of adam: added to the root of the second moment")
    schedule: str = option(
        "constant",
        one_of=("constant", "linear", "exponential", "geometric", "cosine", "table"),
        about="how lr moves over the rounds of a task",
    )
    lr_end: float = option(1e-3, above=0, about="where exponential, geometric and cosine end")
    state: str = option(
        "fresh", one_of=("fresh", "kept", "task"), about="momentum and moments: how long clients keep them"
    )
    factors: Sequence[float] = option((), about="of lr, with schedule = table, each for an equal share of the rounds")
    clip: float = option(0.0, at_least=0, about="greatest L2 norm of the gradient over all parameters; 0: no limit")
    warmup: float = option(0.0, at_least=0, about="rounds of a task in which lr rises linearly to its value")
    by: str = option("round", one_of=("round", "step"), about="what the schedule moves with")
    groups: Sequence[ParameterGroup] = option(
        (), about="tables of match, lr, weight_decay; the first that matches counts"
    )

    option_prefix = "optimizer."

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "groups", tuple(_as_group(group) for group in self.groups))
        if self.lr == 0 and any(group.lr for group in self.groups):
            raise ValueError("optimizer.groups: with lr = 0 no group can have a rate; give lr itself a value")
        if bool(self.factors) != (self.schedule == "table") or not all(factor >= 0 for factor in self.factors):
            raise ValueError(
                "optimizer.factors must be numbers of at least 0, some with schedule = 'table' and none otherwise; got "
                f"{list(self.factors)} with schedule = {self.schedule!r}"
            )


def _as_group(group: ParameterGroup | Mapping[str, Any]) -> ParameterGroup:
    return group if isinstance(group, ParameterGroup) else ParameterGroup(**group)


def _optimizer() -> Optimizer:
    from everfed.core.optimizer import Optimizer

    return Optimizer()


@dataclass(frozen=True)
class TrainOptions(HasOptions):
    """How a client trains."""

    local_epochs: int = option(1, at_least=1, about="passes over a client's samples in a round")
    batch_size: int = option(32, at_least=1, about="samples of a step")
    optimizer: Optimizer = field(default_factory=_optimizer)
    sync_every: int = option(1, at_least=1, about="models are averaged in every so many rounds")
    logits: str = option("full", one_of=RULES, about="which outputs the task loss sees")
    drop_last: bool = option(False, about="leave out an epoch's last batch where it is smaller")
    batchnorm: str = option("mean", one_of=get_args(Statistics))  # model.batchnorm
    micro_batch: int = option(
        0, at_least=0, about="samples of a step whose activations are held at once: less memory, more time; 0: all"
    )

    option_prefix = "train."


# [eval] ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EvalOptions(HasOptions):
    """What is scored, and when."""

    logits: str = option("full", one_of=RULES, about="the outputs that may answer, in what result.json reports")
    every: int = option(0, at_least=0, about="also score every so many rounds; 0: at task ends only")
    zero_shot: bool = option(False, about="also score tasks that were not learned yet, and the untrained model")
    split: str = option("test", one_of=("test", "validation"), about="what is scored on")
    top_k: int = option(1, at_least=1, about="so many highest outputs count as the answer")

    option_prefix = "eval."


# [monitor] ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RiseOptions(HasOptions):
    """The test for a rise of a mean."""

    delta: float = option(0.1, at_least=0, about="a rise of the mean that is tolerated")
    threshold: float = option(0.5, above=0, about="of the statistic")
    window: int = option(5, at_least=1, about="observations that the mean remembers")
    warmup: int = option(2, at_least=1, about="observations before anything is suspected")

    option_prefix = "monitor."


@dataclass(frozen=True)
class MonitorOptions(RiseOptions):
    """A monitor reports where clients' data seems to have changed, and changes no number."""

    kind: str = option("none", one_of=("none", "page-hinkley"), about="the test")
    watch: str = option("loss", one_of=("loss", "features", "both"), about="what is tested")
    samples: int = option(64, at_least=2, about="of which features are made in a round, at most")


# [privacy] ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SumOptions(HasOptions):
    """Secure aggregation: how sums are made."""

    threshold: float = option(2 / 3, above=0.5, at_most=1, about="share of a phase's clients that must stay to its end")
    clip: float = option(16.0, above=0, about="floats are clipped to [-clip, clip]")
    bits: int = option(24, at_least=8, at_most=28, about="floats are sent in steps of 2 clip / 2^bits")

    option_prefix = "privacy."


@dataclass(frozen=True)
class NoiseOptions(HasOptions):
    """Differential privacy: replies are clipped and hidden by noise."""

    kind: str = option("central", one_of=("central", "local"), about="who adds the noise: the server, or each client")
    noise: float = option(1.0, above=0, about="standard deviation in units of clip")
    clip: float = option(1.0, above=0, about="the largest L2 norm of a value")
    delta: float = option(1e-5, above=0, below=1, about="at which epsilon is reported")
    budget: float = option(0.0, at_least=0, about="the epsilon at which the run stops; 0: any")
    seed: int = option(
        -1, at_least=-1, about="-1: a secret key; any other: noise that can be computed, for simulations"
    )

    option_prefix = "privacy.dp."


# [federation] ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WaitOptions(HasOptions):
    """What a phase on real clients waits for."""

    deadline: float = option(
        0.0, at_least=0, about="seconds after which a phase goes on without missing replies; 0: never"
    )
    deadlines: Mapping[str, float] = option(make=dict, about="the same for single phases, by name")
    minimum: int = option(0, at_least=0, about="replies below which a phase never ends; 0: all, or 1 with a deadline")
    enough: float = option(1.0, above=0, at_most=1, about="the share of replies that ends a phase at once")
    retry: float = option(1.0, at_least=0, about="seconds before a failed request is repeated, doubled each time")
    longest_retry: float = option(30.0, at_least=0, about="most seconds between two of these requests")
    silence: float = option(120.0, above=0, about="seconds before an unanswered request is repeated, doubled each time")
    tries: int = option(10, at_least=0, about="failures of a client's own code after which it is absent; 0: no limit")

    option_prefix = "federation."


# the tables of a recipe that have their options from here
TABLES: Mapping[str, type[HasOptions]] = {
    "train": TrainOptions,
    "train.optimizer": OptimizerOptions,
    "train.optimizer.groups": ParameterGroup,
    "eval": EvalOptions,
    "monitor": MonitorOptions,
    "privacy": SumOptions,
    "privacy.dp": NoiseOptions,
    "federation": WaitOptions,
}
