"""What a run lacks of the paper's experiment: its facts against what the paper states, key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everfed.experiments.papers.tables import Stated
from everfed.recipe import ModelSection, StreamSection, TrainSection

ROUNDING = 0.01  # a fifth of every class, rounded, may be a little more or less
_NAMES = {
    "dataset": "data set",
    "image_size": "image size",
    "rounds": "rounds per task",
    "epochs": "local epochs",
}


# what is published -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """train, test: numbers of samples; 0 where no size is published. test_labels: `Source.test_labels` of the official
    test part, "" where it is not known."""

    train: int
    test: int = 0
    test_labels: str = ""


# where a set has no test part of its own, four fifths of it are counted as training samples
SETS = {
    "digits": Published(1_438),
    "mnist": Published(60_000, 10_000, "2fd8de6bdb8d1178"),
    "emnist": Published(240_000, 40_000),
    "emnist-digits": Published(240_000, 40_000),
    "usps": Published(7_291, 2_007),
    "svhn": Published(73_257, 26_032),
    "cifar10": Published(50_000, 10_000, "cbb7365de8ed11f0"),
    "cifar100": Published(50_000, 10_000, "80031c23f8300724"),
    "tiny-imagenet": Published(100_000, 10_000),
    "imagenet-32": Published(600_000),
    "imagenet-224": Published(600_000),
    "office31": Published(3_288),
    "office-caltech10": Published(2_026),
    "pacs": Published(7_993),
    "yahooqa": Published(1_400_000, 60_000),
}
DOMAINS = {"digit10": ("mnist", "emnist-digits", "usps", "svhn")}


def published(dataset: str) -> Published | None:
    """Of a set, or of a list of domains; None where it is not known."""
    domains = domains_of(dataset)
    if any(domain not in SETS for domain in domains):
        return None
    if len(domains) == 1:
        return SETS[domains[0]]
    sizes = [SETS[domain] for domain in domains]
    return Published(
        sum(one.train for one in sizes), sum(one.test for one in sizes) if all(s.test for s in sizes) else 0
    )


def domains_of(dataset: str) -> tuple[str, ...]:
    """The sets that `digit10` or a name such as mnist+usps is made of; a single set is its only domain."""
    return DOMAINS.get(dataset) or tuple(part.strip() for part in dataset.split("+"))


# what a run lacks --------------------------------------------------------------------------------------------------


def of_settings(stated: Stated, settings: Mapping[str, Any]) -> list[str]:
    """What a recipe lacks, before it is run. settings: of `records.settings_of`."""
    return _unlike(stated, _planned(settings))


def of_run(stated: Stated, record: Mapping[str, Any], differs: Sequence[str] = ()) -> list[str]:
    """What a recorded run lacks. differs: the keys in which its settings are not those of the table's recipe."""
    stream, cost = record.get("stream", {}), record.get("cost", {})
    if not stream:
        return ["the record holds no facts about the data"]
    found = _unlike(stated, {**_planned(record.get("settings", {})), **_measured(stream)}) + _data(stated, stream)
    if stream.get("scale", 1.0) != 1.0:
        found.append(f"--scale {stream['scale']:g}")
    if "diverged" not in record and "rounds" in stream and cost.get("rounds", stream["rounds"]) < stream["rounds"]:
        found.append(f"{cost['rounds']} of {stream['rounds']} rounds")
    if differs:
        found.append(f"another recipe than the table's: {', '.join(differs)}")
    return found


def not_stated(stated: Stated) -> list[str]:
    """The settings that the paper leaves open, by name."""
    keys = ["rounds", "epochs", "clients", "participation", "tasks", "model"]
    return [_NAMES.get(key, key) for key in keys if getattr(stated, key) is None]


def _unlike(stated: Stated, facts: Mapping[str, Any]) -> list[str]:
    wanted = stated.model_dump(exclude_none=True, exclude={"columns", "images"})
    return [
        f"{_NAMES.get(key, key)} {facts[key]}, the paper's is {value}"
        for key, value in wanted.items()
        if facts.get(key) is not None and not _same(key, facts[key], value)
    ]


def _same(key: str, found: Any, value: Any) -> bool:
    """Names of encoders and networks also hold a version or a size, which papers leave out."""
    return str(value) in str(found) if key in ("encoder", "model") else bool(found == value)


def _planned(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's settings under the names of `Stated`; what the stream's own default is stays unknown."""
    stream, train = settings.get("stream", {}), settings.get("train", {})
    encoder = stream.get("encoder")
    return {
        "dataset": stream.get("dataset", StreamSection().dataset),
        "image_size": stream.get("image_size"),
        "encoder": None if encoder == "auto" else encoder,
        "model": settings.get("model", {}).get("kind", ModelSection().kind),
        "tasks": stream.get("tasks"),
        "clients": stream.get("clients"),
        "participation": stream.get("participation"),
        "rounds": train.get("rounds_per_task", TrainSection().rounds_per_task),
        "epochs": train.get("local_epochs", TrainSection().local_epochs),
    }


def _measured(stream: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that a run's stream reports about itself; they win over the recipe's. A scaled run is judged by its
    scale, not by the rounds that are left."""
    shape = stream.get("input_shape") or []
    found = {key: stream.get(key) for key in ("dataset", "tasks", "clients", "participation", "encoder")}
    found["image_size"] = shape[-1] if len(shape) == 3 else None
    if stream.get("scale", 1.0) == 1.0:
        found["rounds"] = stream.get("rounds_per_task")
    return {key: value for key, value in found.items() if value is not None}


def _data(stated: Stated, stream: Mapping[str, Any]) -> list[str]:
    """What the samples lack of the published set, or of the number of images that the paper states."""
    used = {part: count for part, count in stream.get("samples", {}).items() if isinstance(count, int)}
    if stated.dataset is None or stream.get("dataset") != stated.dataset or not used:
        return []
    train, test, official = (
        used.get("train", 0) + used.get("validation", 0),
        used.get("test", 0),
        published(stated.dataset),
    )
    if stated.images is not None:
        return (
            [] if _close(train + test, stated.images) else [f"{train + test:,} images, the paper has {stated.images:,}"]
        )
    if official is None:
        return []
    found = []
    if not _close(train, official.train):
        found.append(f"{train:,} of the {official.train:,} published training samples")
    if official.test and not _close(test, official.test):
        found.append(f"{test:,} of the {official.test:,} published test samples")
    elif official.test_labels and stream.get("test_labels") != official.test_labels:
        found.append(f"not the official test part of {stated.dataset}")
    return found


def _close(count: int, wanted: int) -> bool:
    return abs(count - wanted) <= ROUNDING * wanted
