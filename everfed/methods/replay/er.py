"""ER: train on what is stored beside what is new (Chaudhry et al., 2019; Riemer et al., 2019).

per_step: each step draws from the buffer without replacement and takes the mean cross-entropy over all samples in one
forward pass, so the replayed share is b_r / (b + b_r).
union: the buffer and the current data are one data set; every element is used once per epoch ("Coordinated Replay
Sample Selection for Continual Federated Learning").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everfed.method import Batch, Client, Data, Part, Schedule, Step, option
from everfed.methods.replay import memory


@dataclass(frozen=True)
class Replay(Part):
    batch: int = option(32, at_least=1, about="b_r, replayed samples per step (per_step)")
    mode: str = option("per_step", one_of=("per_step", "union"), about="how stored samples are mixed with new ones")

    name = "er"

    def needs(self):
        return {memory.NAME}

    def receive(self, client: Client) -> None:
        """Stored samples that are in the current data already (a reservoir holds some) are not added again."""
        if self.mode == "union":
            kept = memory.stored(client.of(memory.NAME))
            others = np.flatnonzero(~np.isin(kept.ids, client.data.ids))
            if len(others):
                client.data = Data.union([client.data, kept.take(others)])

    def plan(self, client: Client, schedule: Schedule):
        return {} if self.mode == "union" else {"rows": memory.replay_rows(client, self.batch, self.name)}

    def batches(self, step: Step) -> dict[str, Batch]:
        return memory.replayed(step, joined=True) if self.mode == "per_step" else {}
