"""What a finished run leaves beside its model: result.json, a stable interface whose accuracies are fractions, and the
pictures that its stream draws.
"""

from __future__ import annotations

import platform
import resource
import struct
import zlib
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

import everfed
from everfed import engines
from everfed.core.engine import Engine
from everfed.core.evaluate import row_value
from everfed.core.message import State
from everfed.core.option import RULES
from everfed.core.server import RunState
from everfed.core.stream import Stream
from everfed.metrics import matrix as accuracy_matrix
from everfed.metrics.scores import score_of
from everfed.session.assembly import Run
from everfed.store.run import RunFolder


@runtime_checkable
class HasSummary(Protocol):
    """A part with facts of its own for result.json."""

    def summary(self, server: State) -> dict[str, Any]:
        """Plain numbers and words about the finished run."""


def result(run: Run, state: RunState, environment: dict[str, Any], state_bytes: int) -> dict[str, Any]:
    """The content of result.json. environment: the engine's description of itself; state_bytes: of all clients."""
    recipe, stream = run.recipe, run.stream
    measured = _measured(run, state)
    state = _without_metrics(run, state)
    n_test = [int(row[0]) for row in _last_full_row(state) if row is not None]
    curves = _curves(state, stream)
    by_logits = {
        rule: _scores(stream, stream.score, rule, state, n_test, curves if rule == recipe.eval.logits else None)
        for rule in RULES
    }
    chosen = by_logits[recipe.eval.logits]
    return {
        "everfed": everfed.__version__,
        "method": run.method.name,
        "recipe": recipe.name,
        "stream": _facts(run),
        "seed": recipe.seed,
        "scale": run.scale,
        "score": stream.score,
        "logits": recipe.eval.logits,
        "evaluated": "personalised" if run.setup.personal else "global",
        "split": recipe.eval.split,
        "n_test": n_test,
        "accuracy_matrix": chosen["accuracy_matrix"],
        "metrics": {**chosen["metrics"], **{name: one["mean"] for name, one in measured.items() if "mean" in one}},
        **({"measured": measured} if measured else {}),
        "by_logits": by_logits,
        **_further(stream, state, n_test),
        "curves": state.curves,
        **{f"{name}_suspected": memory["suspected"] for name, memory in state.watched.items()},
        "cost": _cost(state, state_bytes),
        **({"frozen_sha256": run.frozen} if run.frozen else {}),
        **_summaries(run, state),
        "environment": {**_machine(), **environment},
    }


def _without_metrics(run: Run, state: RunState) -> RunState:
    """The state with the counts of scores alone."""
    metrics = run.setup.metrics
    if not metrics:
        return state
    rows = {task: [None if row is None else metrics.plain(row) for row in found] for task, found in state.rows.items()}
    initial = None if state.initial is None else [metrics.plain(row) for row in state.initial]
    return replace(state, rows=rows, initial=initial)


def _measured(run: Run, state: RunState) -> dict[str, Any]:
    """By metric of eval.metrics: its values on every task at the end of the run (`by_task`), the value of all tasks'
    sums together (`whole`), and for numbers the mean over tasks and the matrix of values, row t after task t."""
    metrics, last = run.setup.metrics, [row for row in _last_full_row(state) if row is not None]
    if not metrics or not last:
        return {}
    by_task = [metrics.values(row) for row in last]
    whole, means = metrics.values(np.sum(np.array(last), axis=0).tolist()), metrics.means(last)
    rows = [state.rows[task] for task in sorted(state.rows)]
    matrices = [[None if entry is None else metrics.values(entry) for entry in row] for row in rows]
    found = {}
    for metric in metrics.metrics:
        name = metric.name
        kind = {"percent": metric.percent, "better": metric.better}
        found[name] = {**kind, "by_task": [values[name] for values in by_task], "whole": whole[name]}
        if name in means:
            matrix = [[None if values is None else values[name] for values in row] for row in matrices]
            found[name] |= {"mean": means[name], "matrix": matrix}
    return found


def _facts(run: Run) -> dict[str, Any]:
    """What the stream reports of itself; its scale is that of the work, of which it keeps the root."""
    facts = run.stream.describe()
    return {**facts, "scale": run.scale} if "scale" in facts else facts


def at_chance(stream: Stream, summary: dict[str, Any]) -> str | None:
    """A warning where the tasks just learned are scored about as well as by guessing one of their classes. Only these
    may answer: a model that keeps all classes apart is below such a guess where it has to choose among them."""
    if stream.score != "accuracy":
        return None
    learned = summary["by_logits"]["task"]["metrics"].get("learning_accuracy")
    if learned is None:
        return None
    chance = sum(1 / max(1, len(stream.labels(task))) for task in range(stream.tasks)) / stream.tasks
    if learned > chance + 0.05 or chance > 0.95:  # nothing is to be learned where a task has one class
        return None
    return (
        f"the model has learned nothing: {100 * learned:.1f} % among the classes of a task right after it was trained, "
        f"where guessing gives {100 * chance:.1f} %; try another train.optimizer.lr, more train.rounds_per_task, or "
        "another model.kind"
    )


def _cost(state: RunState, state_bytes: int) -> dict[str, Any]:
    return {
        "rounds": state.round,
        "seconds": state.seconds,
        **state.traffic.as_dict(),
        "client_state_bytes": state_bytes,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "samples": state.samples,
        **({"absent": dict(state.absent)} if state.absent else {}),
    }


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": engines.cores(),
    }


def _summaries(run: Run, state: RunState) -> dict[str, Any]:
    """The parts' own summaries, by part; nothing for most methods."""
    found = {p.name: p.summary(state.server) for p in run.method.parts if isinstance(p, HasSummary)}
    return {"parts": found} if found else {}


def _further(stream: Stream, state: RunState, n_test: list[int]) -> dict[str, Any]:
    """by_score: the scores that a stream measures beside its own."""
    found = {name: _scores(stream, name, RULES[0], state, n_test, None) for name in stream.also}
    return {"by_score": found} if found else {}


def _last_full_row(state: RunState) -> list[list[float] | None]:
    return state.rows[max(state.rows)] if state.rows else []


def _curves(state: RunState, stream: Stream) -> accuracy_matrix.Curves | None:
    """The scores after every round, for metrics that count rounds; None when not every round was scored."""
    if [entry["round"] for entry in state.curves] != list(range(stream.rounds)):
        return None
    return accuracy_matrix.by_task(state.curves, stream.tasks)


def _scores(
    stream: Stream, score: str, rule: str, state: RunState, n_test: list[int], curves: accuracy_matrix.Curves | None
) -> dict[str, Any]:
    rows = [
        [row_value(stream, row, rule, score) if row else None for row in state.rows[task]]
        for task in sorted(state.rows)
    ]
    baseline = [row_value(stream, row, rule, score) for row in state.initial] if state.initial else None
    return {"accuracy_matrix": rows, "metrics": _summary(score, rows, n_test, curves, baseline)}


def _summary(
    score: str,
    rows: list[list[float | None]],
    n_test: list[int],
    curves: accuracy_matrix.Curves | None,
    baseline: list[float | None] | None,
) -> dict[str, float | None]:
    """Metrics by name. Perplexities are summed up over all periods, from the models that were scored on all of them."""
    tested = _tested(rows)
    if len(tested) < len(rows):
        rows, n_test, curves = _only(tested, rows), [n_test[task] for task in tested], None
        baseline = None if baseline is None else [baseline[task] for task in tested]
    known = None if baseline is None or None in baseline else [b for b in baseline if b is not None]
    found = accuracy_matrix.summary(rows, n_test=n_test, curves=curves, baseline=known, score=score_of(score))
    if score != "perplexity":
        return found
    whole = [[v for v in row if v is not None] for row in rows if None not in row]
    return {**accuracy_matrix.language_summary(whole, n_test), "forgetting": found["forgetting"]}


def _tested(rows: list[list[float | None]]) -> list[int]:
    """The tasks that anybody was ever scored on: a stream as it comes may end before the run does. All of them, where
    there is none."""
    found = [task for task in range(len(rows)) if any(row[task] is not None for row in rows)]
    return found or list(range(len(rows)))


def _only(tasks: list[int], rows: list[list[float | None]]) -> list[list[float | None]]:
    """The matrix of these tasks; its last row is the end of the run."""
    after = [*(rows[task] for task in tasks[:-1]), rows[-1]]
    return [[row[task] for task in tasks] for row in after]


# pictures ----------------------------------------------------------------------------------------------------------

PICTURES = 4  # of every task
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def save_pictures(folder: RunFolder, stream: Stream, engine: Engine, state: RunState) -> None:
    """Some test samples of every task as the stream draws them, with the trained model's predictions."""
    if not stream.has_pictures:
        return
    trainer = engine.workbench()
    drawn: dict[str, bytes] = {}
    for task in range(stream.tasks):
        data = stream.test(task).take(np.arange(min(PICTURES, len(stream.test(task)))))
        found = stream.pictures(trainer.outputs(state.model, data.x).cpu(), data)
        drawn |= {f"task{task + 1}-{number + 1}": png(picture) for number, picture in enumerate(found)}
    folder.write_pictures(drawn)


def png(pixels: np.ndarray) -> bytes:
    """The file of an image (height, width, 3) of uint8, made without a package for images."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"expected (height, width, 3) of uint8, got {pixels.dtype} {pixels.shape}")
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, colour
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter
    return (
        _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
