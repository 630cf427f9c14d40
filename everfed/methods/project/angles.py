"""Angles: how well a client's tasks, and a round's clients, agree (STAMP, Fig. 3 and 4). A part that only measures.

After local training every participant trains a clone of its current model theta on each of its tasks so far, the
current one included, as long as a local training lasts:

    temporal   mean over the pairs i < j of its tasks of cos(Delta_i, Delta_j),  Delta_i = theta_i - theta
    spatial    mean over the pairs of clients of the cosine between their updates of the round

as the released code does for every method. Both are reported as events ("measure"). Added to a method as its last part,
`everfed.methods.project.angles:Angles`, it changes no result. It reads the data of earlier tasks, and each participant
sends its update a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from everfed.method import BOUNDARIES, HISTORY, Client, Collect, Data, Fitted, Mean, Part, Server, Tells, option
from everfed.methods.project.fedomg import mean_cosine, report_angles
from everfed.methods.project.stamp import train_clone


@dataclass(frozen=True)
class Angles(Part):
    every: int = option(1, at_least=1, about="measured in the last of every so many rounds")
    samples: int = option(0, at_least=0, about="of each task that a clone is trained on, drawn at random; 0: all")

    name = "angles"

    def needs(self):
        return {BOUNDARIES, HISTORY}

    def reply(self, client: Client):
        if (client.round + 1) % self.every:
            return {}
        values, theta = {"update": client.update}, client.model["params"]
        tasks = [task for task in (*client.history(), client.data) if len(task)]
        if len(tasks) < 2:
            return values
        ends = [self._clone(client, f"angles {i}", task) for i, task in enumerate(tasks)]
        cosine = mean_cosine([(end - theta)[: client.layout.shared].cpu() for end in ends])
        return values if cosine is None else {**values, "cosine": cosine, "tasks": len(tasks)}

    def _clone(self, client: Client, tag: str, data: Data) -> Tensor:
        """(P,) where training the current model on a task ends; the optimiser goes on from the client's state."""
        if self.samples:
            data = data.take(client.rng(tag).permutation(len(data))[: self.samples])
        return train_clone(client, client.model, data, moments=_moments(client.fitted), tag=tag)

    def reducers(self):
        return {"update": Collect(tells=Tells.GRADIENTS), "cosine": Mean(), "tasks": Mean()}

    def update(self, server: Server) -> None:
        reduced = server.reduced
        updates = list((reduced.get("update") or {}).values())
        report_angles(server, "spatial", mean_cosine(updates), len(updates))
        if reduced.get("cosine") is not None:
            report_angles(server, "temporal", float(reduced["cosine"]), round(float(reduced["tasks"])))


def _moments(fitted: Fitted) -> dict[str, Tensor] | None:
    """The optimiser's state after training; None, a fresh one, where parts of the method divide the vector."""
    vectors = [moment for moment in fitted.moments.values() if moment.dim()]
    whole = all(len(moment) == len(fitted.model["params"]) for moment in vectors)
    return fitted.moments if vectors and whole else None
