"""What a plan costs: training samples processed, from the recipe alone, before any data is read."""

from __future__ import annotations

from everfed.experiments.papers.published import SETS, domains_of
from everfed.recipe import Recipe


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
    domains = domains_of(dataset)
    if any(domain not in SETS for domain in domains):
        return None
    return sum(min(SETS[domain].train, most or SETS[domain].train) for domain in domains)
