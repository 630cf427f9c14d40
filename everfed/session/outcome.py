"""Pictures that a finished run leaves beside its numbers, where the stream draws them."""

from __future__ import annotations

import numpy as np

from everfed.core.engine import Engine
from everfed.core.run_state import RunState
from everfed.core.stream import Stream
from everfed.store.png import png
from everfed.store.run import RunFolder

PICTURES = 4  # of every task


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
