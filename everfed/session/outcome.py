"""What a finished run leaves beside its numbers: the trained model, and pictures where the stream draws them."""

from __future__ import annotations

import numpy as np
import safetensors.torch
import torch
from torch import nn

from everfed.core.engine import Engine
from everfed.core.run_state import RunState
from everfed.core.stream import Stream
from everfed.session.assembly import Assembly
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


def save_model(folder: RunFolder, assembly: Assembly, state: RunState) -> None:
    """The trained model by parameter name, as any PyTorch user expects it; personal parameters as at the beginning."""
    module, facts = assembly.build_module(), assembly.world.facts
    params = torch.cat([state.model["params"].cpu(), facts.personal])
    facts.layout.bind(module, params, *(state.model[key].cpu() for key in ("stats", "counters")))
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in module.state_dict().items()}
    folder.write_model(safetensors.torch.save(tensors))


def load_module(folder: RunFolder, assembly: Assembly) -> nn.Module:
    """The trained model of a finished run, in eval mode."""
    module = assembly.build_module()
    module.load_state_dict(safetensors.torch.load(folder.model.read_bytes()))
    return module.eval()
