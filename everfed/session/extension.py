"""Further tasks for a finished run, where it would have been the same run had it had them from the start.

The longer stream must begin like that of the run, and neither the network nor a part may use the number of tasks. More
rounds per task are another run: a task's end, which parts act on, would lie elsewhere.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from itertools import product

import numpy as np
import torch

from everfed.core.data import Data
from everfed.core.method import Method
from everfed.core.option import EvalOptions
from everfed.core.phase import EVALUATE, Phase
from everfed.core.server import RunState, phases_of
from everfed.core.stream import Stream
from everfed.session.assembly import Run, fingerprint
from everfed.store.checkpoint import Checkpoints, latest, recipe_of
from everfed.store.clients import ClientStore
from everfed.store.run import RunError, RunFolder

_LENGTH = re.compile(r"\bfacts\.(tasks|rounds)\b")


def extend(folder: RunFolder, run: Run, longer: Run, recipe_toml: str) -> None:
    """Make a finished `run` an unfinished one of the recipe of `longer`, with more tasks. Raises RunError where it
    would not be that run; nothing is changed then."""
    if problem := next(_differences(run, longer), ""):
        raise RunError(f"{folder.path} cannot go on to {longer.stream.tasks} tasks: {problem}. Run it anew")
    before, after = fingerprint(run), fingerprint(longer)
    # killed after any of these steps, the same command goes on
    if recipe_of(folder.checkpoint) != after:
        store = ClientStore(folder.clients)
        state = latest(folder.checkpoint, store, before)
        if state is None or state.round != run.stream.rounds:
            raise RunError(f"{folder.path} is not finished; go on with `everfed resume {folder.path}` first")
        _reopen(state, run, longer)
        Checkpoints(folder.checkpoint, store, recipe=after).write(state.to_tree(), *store.snapshot())
    folder.reopen(recipe_toml)


def _reopen(state: RunState, run: Run, longer: Run) -> None:
    """Put the end of a run back to where the longer one goes on: before the phases that its last round left out."""
    more = longer.stream.tasks - run.stream.tasks
    if (left_out := _left_out(run, longer)) is not None:
        state.round, state.position = state.round - 1, left_out
        state.curves = [entry for entry in state.curves if entry["round"] != state.round]
        del state.rows[run.stream.round(state.round).task]
    state.rows = {task: [*row, *[None] * more] for task, row in state.rows.items()}


def _left_out(run: Run, longer: Run) -> int | None:
    """The position of the first phase that the last round left out because it was the last; None where it left out
    none."""
    ran, due = _last_phases(run, run), _last_phases(run, longer)
    return None if len(ran) == len(due) else next(i for i, one in enumerate(due) if one.name != ran[i].name)


def _last_phases(run: Run, of: Run) -> list[Phase]:
    """The phases of the last round of `run`, as they are in `of`."""
    last = run.stream.rounds - 1
    return list(phases_of(of.setup, run.recipe.eval.as_options(EvalOptions), last, of.stream.round(last)))


# why a run would be another one --------------------------------------------------------------------------------------
def _differences(run: Run, longer: Run) -> Iterator[str]:
    """Why a run is not the beginning of the longer one; the first reason counts."""
    if run.recipe.eval.as_options(EvalOptions).zero_shot:
        yield "with eval.zero_shot every row of its scores is over all tasks"
    if run.stream.rounds >= longer.stream.rounds:
        yield f"it has {run.stream.tasks} tasks already"
    yield from _of_streams(run.stream, longer.stream)
    if run.setup.facts.layout != longer.setup.facts.layout or not torch.equal(
        run.first["params"], longer.first["params"]
    ):
        yield "its network depends on the number of tasks"
    yield from _of_parts(longer.method)
    if (left_out := _left_out(run, longer)) is not None:
        missing = _last_phases(run, longer)[left_out]
        for phase in _last_phases(run, run)[left_out:]:
            if phase.name != EVALUATE:
                yield (
                    f"its last round left out phase {missing.name!r} of part {missing.owner!r}, which comes before "
                    f"{phase.name!r} of part {phase.owner!r}"
                )


def _of_streams(old: Stream, new: Stream) -> Iterator[str]:
    facts = ("classes", "clients", "input_shape")
    if [getattr(old, key) for key in facts] != [getattr(new, key) for key in facts]:
        yield "with more tasks the stream has other classes, clients or samples"
        return
    for index in range(old.rounds):
        if old.round(index) != new.round(index):
            yield f"with more tasks the stream has another round {index + 1}"
            return
    for task, client in product(range(old.tasks), range(old.clients)):
        if not _equal(old.data(client, task), new.data(client, task)):
            yield f"with more tasks the stream has other samples in task {task + 1}"
            return
        if not _equal(old.test_of(client, task), new.test_of(client, task)):
            yield f"with more tasks the stream has other tests of task {task + 1}"
            return
    for task in range(old.tasks):
        if old.labels(task) != new.labels(task) or not _equal(old.test(task), new.test(task)):
            yield f"with more tasks the stream has other tests of task {task + 1}"
            return


def _equal(one: Data, other: Data) -> bool:
    return torch.equal(one.x, other.x) and torch.equal(one.y, other.y) and np.array_equal(one.ids, other.ids)


def _of_parts(method: Method) -> Iterator[str]:
    """Parts whose file reads how many tasks or rounds there are."""
    for part in method.parts:
        for kind in type(part).__mro__[:-1]:
            if not kind.__module__.startswith("everfed.core.") and (found := _LENGTH.search(_source(kind))):
                yield f"part {part.name!r} uses {found[0]}"


def _source(kind: type) -> str:
    module = inspect.getmodule(kind)
    return inspect.getsource(module if module is not None else kind)
