"""The keys of a recipe's [stream] table that every scenario shares, checked when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everfed.data import augment as augmentations
from everfed.data.partition import check_options
from everfed.data.targets import KINDS
from everfed.errors import PartitionError, SettingError
from everfed.naming import NameProblem

# (mean, std) per channel of the named normalisations; a single entry serves every channel.
NORMALISATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "none": ((), ()),
    "half": ((0.5,), (0.5,)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
# default normalisation of a set (FedGP's code); all other sets: none
USUAL_NORMALISATION: Mapping[str, str] = {"cifar10": "half", "cifar100": "cifar100"}
AUGMENTATIONS: Mapping[str, str] = {
    "none": "train on the images as they are",
    "crop-flip": "random crop after zero-padding by 4, and random horizontal flip, in training only",
    "crop-flip-brightness": "the same, and a brightness of 1 - 63/255 to 1 + 63/255",
}


class OptionError(SettingError):
    """A key of the stream that is unknown or has a value that is not allowed."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"stream.{key}: {problem}")
        self.key = f"stream.{key}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that all scenarios share.

    tasks, clients: how many. partition: {kind, and its options}. participation: share of clients per round, (0, 1].
    normalise: "none", "half" (0.5/0.5), "cifar100", "imagenet" or {mean, std}; None: the set's default.
    augment: one of AUGMENTATIONS, a list of tables {kind, and its options} (`everfed.data.augment`), or from Python a
    transform of torchvision's v2. validation: share of every class held out of the training data, [0, 1).
    boundaries: False hides from methods when tasks begin and end. max_train, max_test: at most so many samples.
    image_size, channels: bring images to this format first. encoder: turns texts into vectors ("auto" by default).
    label: the column of a table that has the labels. label_kind: "classes", "multi-label", "regression" or "tokens";
    None: by the type and shape of the labels.

    asynchronous: each client changes tasks by its own clock (`everfed.streams.clocks`). availability, deadline: clients
    come and go, and reply late (`everfed.streams.attendance`). arrivals: a round ends with its K-th reply, and others
    arrive in later ones (`everfed.streams.arrivals`). without: {client: tasks in which it holds no data}.
    order: the tasks in the order in which they come, again where they recur, counted from 0. drift: in so many rounds
    before a change the next task's samples come in gradually; needs boundaries = False.
    """

    tasks: int = 5
    clients: int = 10
    partition: Mapping[str, Any] = field(default_factory=lambda: {"kind": "iid"})
    participation: float = 1.0
    normalise: str | Mapping[str, Any] | None = None
    augment: str | Sequence[Mapping[str, Any]] | Callable[..., Any] = "none"
    validation: float = 0.0
    boundaries: bool = True
    max_train: int | None = None
    max_test: int | None = None
    image_size: int | None = None
    channels: int | None = None
    encoder: str | None = None
    label: str | None = None
    label_kind: str | None = None
    asynchronous: Mapping[str, Any] | None = None
    availability: Mapping[str, Any] | None = None
    deadline: Mapping[str, Any] | None = None
    arrivals: Mapping[str, Any] | None = None
    without: Mapping[str, Any] | None = None
    order: Sequence[int] | None = None
    drift: int = 0

    def __post_init__(self) -> None:
        require_whole("tasks", self.tasks)
        require_whole("clients", self.clients)
        require_number("participation", self.participation, above=0.0, to=1.0)
        require_number("validation", self.validation, least=0.0, below=1.0)
        _check_augment(self.augment)
        if not isinstance(self.boundaries, bool):
            raise OptionError("boundaries", f"expected true or false, got {self.boundaries!r}")
        for key in ("max_train", "max_test", "image_size", "channels"):
            if getattr(self, key) is not None:
                require_whole(key, getattr(self, key))
        for key in ("encoder", "label"):
            if not isinstance(getattr(self, key), str | None):
                raise OptionError(key, f"expected a name, got {getattr(self, key)!r}")
        if self.label_kind is not None:
            require_choice("label_kind", self.label_kind, KINDS)
        _check_partition(self.partition)
        if self.normalise is not None:
            normalisation(self.normalise)
        require_whole("drift", self.drift, least=0)
        if self.drift and self.boundaries:
            raise OptionError("drift", "a task that ends gradually has no boundary; set boundaries = false")
        if self.arrivals is not None and (self.deadline or self.availability or self.participation < 1.0 or self.drift):
            raise OptionError("arrivals", "leave out deadline, availability, participation and drift")
        _check_order(self.order, self.tasks)
        _check_without(self.without, self.clients, self.tasks)

    @property
    def episodes(self) -> int:
        """The number of tasks in a run, recurring ones counted every time."""
        return self.tasks if self.order is None else len(self.order)

    def kind_of(self, episode: int) -> int:
        """The task that comes in this place of the order."""
        return episode if self.order is None else self.order[episode]

    def holds_nothing(self, client: int, kind: int) -> bool:
        return self.without is not None and kind in self.without.get(str(client), ())


def normalisation(value: str | Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of `normalise = value`; both empty when nothing is normalised."""
    if isinstance(value, str):
        require_choice("normalise", value, NORMALISATIONS)
        return NORMALISATIONS[value]
    if not isinstance(value, Mapping) or set(value) != {"mean", "std"}:
        allowed = ", ".join(NORMALISATIONS)
        raise OptionError("normalise", f"expected one of {allowed}, or a table with mean and std, got {value!r}")
    mean, std = _numbers("normalise.mean", value["mean"]), _numbers("normalise.std", value["std"])
    if len(mean) != len(std):
        raise OptionError("normalise", f"mean has {len(mean)} entries and std {len(std)}; one per channel is needed")
    if min(std) <= 0:
        raise OptionError("normalise.std", f"every entry must be positive, got {list(std)}")
    return mean, std


def require_whole(key: str, value: Any, least: int = 1) -> None:
    """Raises OptionError for anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(key, f"expected a whole number of at least {least}, got {value!r}")


def require_number(
    key: str,
    value: Any,
    *,
    least: float = -float("inf"),
    above: float = -float("inf"),
    to: float = float("inf"),
    below: float = float("inf"),
) -> None:
    """Raises OptionError for anything but a number with least <= value, above < value, value <= to, value < below."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (least <= value <= to and above < value < below):
        low = f"({above:g}" if above > least else f"[{least:g}"
        high = f"{below:g})" if below < to else f"{to:g}]"
        raise OptionError(key, f"expected a number in {low}, {high}, got {value!r}")


def require_choice(key: str, value: Any, allowed: Mapping[str, Any] | tuple[str, ...]) -> None:
    """Raises OptionError for anything but one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(key, f"{value!r} is not one of the allowed values: {', '.join(allowed)}")


def refuse_unused(options: Options, unused: Sequence[str], scenario: str) -> None:
    """Raises OptionError for options that are set but have no effect in a scenario."""
    usual = Options()
    for key in unused:
        if getattr(options, key) != getattr(usual, key):
            raise OptionError(key, f"has no effect in the scenario {scenario}; leave it out")


def _check_augment(augment: Any) -> None:
    if callable(augment):
        return
    if not isinstance(augment, list | tuple):
        require_choice("augment", augment, AUGMENTATIONS)
        return
    try:
        augmentations.parse(augment)
    except ValueError as problem:
        raise OptionError("augment", str(problem)) from problem


def _check_partition(partition: Any) -> None:
    named = isinstance(partition, Mapping) and (
        isinstance(partition.get("kind"), str) or callable(partition.get("kind"))
    )
    if not named:
        raise OptionError("partition", f"expected a table with a kind, such as {{ kind = 'iid' }}, got {partition!r}")
    try:
        check_options(partition["kind"], {k: v for k, v in partition.items() if k != "kind"})
    except (PartitionError, NameProblem) as problem:
        raise OptionError("partition", str(problem)) from problem


def _check_order(order: Any, tasks: int) -> None:
    if order is None:
        return
    numbers = isinstance(order, (list, tuple)) and all(type(task) is int and 0 <= task < tasks for task in order)
    if not numbers or not order:
        raise OptionError("order", f"expected a list of task numbers from 0 to {tasks - 1}, got {order!r}")


def _check_without(without: Any, clients: int, tasks: int) -> None:
    if without is None:
        return
    if not isinstance(without, Mapping):
        raise OptionError("without", f"expected a table {{ client = [tasks] }}, got {without!r}")
    for client, held in without.items():
        if not str(client).isdigit() or int(client) >= clients:
            raise OptionError("without", f"client {client!r} is not one of 0 to {clients - 1}")
        if not isinstance(held, (list, tuple)) or not all(type(task) is int and 0 <= task < tasks for task in held):
            raise OptionError(f"without.{client}", f"expected a list of tasks from 0 to {tasks - 1}, got {held!r}")


def _numbers(key: str, value: Any) -> tuple[float, ...]:
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not entries:
        raise OptionError(key, "expected one number per channel, got none")
    for entry in entries:
        require_number(key, entry, above=-float("inf"), below=float("inf"))
    return tuple(float(entry) for entry in entries)
