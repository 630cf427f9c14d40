"""How good a model is on the test sets of some tasks: counts of correct answers under every logit rule at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everfed.core.fit import Trainer
from everfed.core.part import Model, State
from everfed.core.tree import Tree
from everfed.metrics.scoring import RULES, class_mask, correct_counts

COLUMNS = ("scored", *RULES)


def score_tasks(
    trainer: Trainer,
    model: Model,
    tasks: Sequence[int],
    seen: int,
    split: str = "test",
    state: State | None = None,
    message: dict[str, Tree] | None = None,
) -> Tensor:
    """(len(tasks), 4) int64 on the host: samples scored, then correct under `full`, `seen` and `task` logits.

    seen: how many tasks have begun; their classes are the seen ones. state, message: a client's own, for a personalised
    forward pass.
    """
    stream = trainer.stream
    known = sorted({label for task in range(seen) for label in stream.labels(task)})
    seen_mask = class_mask(known, stream.classes).to(trainer.device)
    rows = []
    for task in tasks:
        data = stream.test(task, split)
        outputs = trainer.outputs(model, data.x, state, message)
        own = class_mask(stream.labels(task), stream.classes).to(trainer.device)
        counts = correct_counts(outputs, data.y.to(trainer.device), seen_mask, own)
        rows.append(torch.stack([torch.tensor(len(data), device=trainer.device), *(counts[rule] for rule in RULES)]))
    return torch.stack(rows).cpu()
