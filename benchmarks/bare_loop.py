"""FedAvg as a researcher would write it by hand: a plain PyTorch loop that does the same arithmetic, for comparison."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

from everfed.core.random import adopt_dropout
from everfed.core.stream import Stream


class BareFedAvg:
    """One model trained on client after client with torch.optim.SGD, then averaged."""

    def __init__(
        self,
        stream: Stream,
        module: nn.Module,
        lr: float,
        batch: int,
        epochs: int,
        device: str = "cpu",
        bf16: bool = False,
    ) -> None:
        self.stream, self.lr, self.batch, self.epochs, self.bf16 = stream, lr, batch, epochs, bf16
        self.device = device
        self.module = module.to(device)
        adopt_dropout(self.module, torch.Generator(device).manual_seed(0))
        self.global_state = copy.deepcopy(module.state_dict())
        self.data = [stream.data(client, 0) for client in range(stream.clients)]

    def round(self) -> None:
        """One round with every client."""
        states = [self._client(x.x, x.y) for x in self.data]
        self.global_state = {
            name: torch.stack([state[name].float() for state in states]).mean(0).to(value.dtype)
            for name, value in self.global_state.items()
        }

    def _client(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.module.load_state_dict(self.global_state)
        self.module.train()
        optimizer = torch.optim.SGD(self.module.parameters(), lr=self.lr)
        x, y = x.to(self.device), y.to(self.device)
        for _ in range(self.epochs):
            order = torch.randperm(len(y), device=self.device)
            for start in range(0, len(y), self.batch):
                rows = order[start : start + self.batch]
                optimizer.zero_grad()
                with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.bf16):
                    loss = functional.cross_entropy(self.module(self.stream.inputs(x[rows])), y[rows])
                loss.backward()
                optimizer.step()
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}
