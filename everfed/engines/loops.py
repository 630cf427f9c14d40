"""Device work that is repeated many times, captured once as a CUDA graph and then replayed: the server's own training.

The trainer of the server's phases under the graphs engine. Everything else it does as every other trainer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from everfed.core.trainer import Trainer
from everfed.engines.captured import WARM_UPS, no_garbage_collection, record


class LoopingTrainer(Trainer):
    """A trainer on a CUDA device whose loops are captured."""

    def loop(
        self, body: Callable[[], None], changed: Sequence[Tensor], generator: torch.Generator
    ) -> Callable[[int], None]:
        return CapturedLoop(self.device, body, changed, generator)


class CapturedLoop:
    """Captures when it is first run. Trial runs come before, on copies as it were: what they change is put back."""

    def __init__(
        self, device: torch.device, body: Callable[[], None], changed: Sequence[Tensor], generator: torch.Generator
    ) -> None:
        self.device, self.body, self.changed, self.generator = device, body, list(changed), generator
        self.stream = torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, times: int) -> None:
        """Run the body `times` times, queued on the current stream."""
        if times and self.graph is None:
            self.graph = self._capture()
        for _ in range(times):
            assert self.graph is not None
            self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            saved = [tensor.clone() for tensor in self.changed]
            state = self.generator.get_state()
            for _ in range(WARM_UPS):
                self.body()
            self._restore(saved, state)
            self.stream.synchronize()
        graph.register_generator_state(self.generator)
        gc.collect()  # the loop of the task before may be held by a cycle, with its memory
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.stream):
            with no_garbage_collection():
                graph.capture_begin(capture_error_mode="thread_local")
                record(self.body, graph)
            self._restore(saved, state)
        current.wait_stream(self.stream)
        return graph

    def _restore(self, saved: Sequence[Tensor], state: Tensor) -> None:
        for tensor, old in zip(self.changed, saved, strict=True):
            tensor.copy_(old)
        self.generator.set_state(state)
