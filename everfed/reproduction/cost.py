"""The cost of a plan: training samples processed, from the recipe alone, before any data is read.

The published sizes of the data sets also show whether a run used all of its set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everfed.recipe import Recipe

# training samples of the named sets; where a set has no test part of its own, four fifths of it
TRAINING_SAMPLES = {
    "digits": 1438,
    "mnist": 60_000,
    "emnist": 240_000,
    "emnist-digits": 240_000,
    "usps": 7_291,
    "svhn": 73_257,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "tiny-imagenet": 100_000,
    "imagenet-32": 600_000,
    "imagenet-224": 600_000,
    "office31": 3_288,
    "office-caltech10": 2_026,
    "pacs": 7_993,
}
ROUNDING = 0.99  # a fifth of every class, rounded, may be a little more or less
DOMAINS = {"digit10": ("mnist", "emnist-digits", "usps", "svhn")}


def training_samples(recipe: Recipe, method: str, scale: float = 1.0) -> float | None:
    """Samples that one run processes, each counted whenever it is trained on; None where it is not known.

    Replayed, generated and reference samples of a method are not counted; `ideal` trains on all tasks so far.
    """
    per_round = _samples_per_epoch(recipe)
    if per_round is None:
        return None
    stream, train = recipe.stream.model_extra or {}, recipe.train
    tasks, share = stream.get("tasks", 5), stream.get("participation", 1.0)
    rounds = max(1, round(train.rounds_per_task * scale))
    history = (tasks + 1) / 2 if method == "ideal" else 1.0
    return per_round * scale * rounds * train.local_epochs * share * history


def _samples_per_epoch(recipe: Recipe) -> float | None:
    """Training samples of all clients, summed over the tasks."""
    stream = recipe.stream.model_extra or {}
    size = _size(recipe.stream.dataset, stream.get("max_train"))
    if recipe.stream.scenario == "periods":
        limit = stream.get("max_train")  # counts per client and period
        return None if limit is None else limit * stream.get("clients", 10) * stream.get("tasks", 5)
    if size is None:
        return None
    kept = size * (1 - stream.get("validation", 0.0))
    if recipe.stream.scenario == "domain-incremental":
        return kept * stream.get("tasks", 5)
    if recipe.stream.scenario == "task-pool" and stream.get("sample_split", "shared") == "shared":
        return kept * stream.get("clients", 10)
    return kept


def _size(dataset: str, most: int | None) -> float | None:
    """Training samples of a set, or of a list of domains, of which each has at most `most`."""
    domains = DOMAINS.get(dataset) or dataset.split("+")
    if any(domain not in TRAINING_SAMPLES for domain in domains):
        return None
    return sum(min(TRAINING_SAMPLES[domain], most or TRAINING_SAMPLES[domain]) for domain in domains)


def shortfall(stream: Mapping[str, Any]) -> str:
    """What a run's data lacks of the published set, by the facts of its stream; "" if it lacks nothing known."""
    published, used = _size(str(stream.get("dataset")), stream.get("max_train")), stream.get("samples", {})
    found = used.get("train", 0) + used.get("validation", 0)
    if published is None or not used or found >= ROUNDING * published:
        return ""
    return f"on {found:,} of the {published:,.0f} published training samples"
