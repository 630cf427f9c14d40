"""iCaRL in a federation: exemplars, distillation and the nearest mean of exemplars (Rebuffi et al., "iCaRL:
Incremental Classifier and Representation Learning", CVPR 2017). Clients' networks are averaged, as in federated papers.

Each client keeps exemplars by herding (`herding.py`) and trains on them and its new data together. With g_y the sigmoid
of output y, q_y that of the last task's model, and S the classes seen so far (Algorithm 3),

    L = - mean over samples i and classes y in S of t_iy log g_y(x_i) + (1 - t_iy) log(1 - g_y(x_i)),
    t_iy = q_y(x_i) for classes of earlier tasks alone, and 1 at the label, else 0, for those of the current task

At a task's end a class is represented by the mean of its exemplars' features phi, all of unit length (Algorithm 1):

    mu_y = normalised mean of phi(p) over the exemplars p of all clients,   y* = argmin_y |phi(x) - mu_y|

For unit vectors that is argmax_y <phi(x), mu_y>, a linear head with weights mu_y: the shared model has this head until
the next task begins, where it gets the trained one back. Between the ends of tasks the trained head is scored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from everfed.method import (
    BEGIN,
    BOUNDARIES,
    END,
    TOGETHER,
    Cached,
    Client,
    Cohort,
    CompositionError,
    Phase,
    Server,
    Step,
    Sum,
    Tells,
    When,
    option,
)
from everfed.methods.common.layers import head_entries, head_weight
from everfed.methods.common.teacher import OUT, among, binary, competing, frozen_outputs, knowing, mask_of
from everfed.methods.features.statistics import ReplacesHead, feature_rows, task_classes
from everfed.methods.replay import memory


@dataclass(frozen=True)
class ICaRL(ReplacesHead):
    classifier: str = option(
        "means", one_of=("means", "outputs"), about="nearest mean of exemplars, or the network's outputs (hybrid1)"
    )
    distillation: bool = option(True, about="False: labels alone (hybrid2)")

    name = "icarl"

    def needs(self):
        return {*super().needs(), memory.NAME, BOUNDARIES, TOGETHER}

    def check(self, parts, optimizer):
        super().check(parts, optimizer)
        buffer = next(part for part in parts if isinstance(part, memory.Memory))
        chosen_late = any(not phase.in_last_round for phase in buffer.chooser.phases(buffer))
        if self.classifier == "means" and chosen_late:
            raise CompositionError(
                "part 'icarl' classifies by exemplars of all tasks, but memory.policy chooses none of the last one; "
                'set memory.policy = { kind = "herding", last = true }, or icarl.classifier = "outputs"'
            )

    def phases(self):
        """The teacher has the trained head, so it is kept before the means replace that."""
        teacher = Phase("teacher", Cohort.SERVER, END, in_last_round=False, update=self._keep_teacher)
        means = Phase(
            "means",
            Cohort.ALL,
            END,
            reduce={"sums": Sum(tells=Tells.SUMS)},
            run=self._sums,
            update=self._classify_by_means,
        )
        back = Phase("restore", Cohort.SERVER, BEGIN, When.BEFORE, update=self._trained_head)
        return (*([teacher] if self.distillation else []), *([back, means] if self.classifier == "means" else []))

    # training --------------------------------------------------------------------------------------------------------
    def _keep_teacher(self, server: Server) -> None:
        server.state |= {"teacher": knowing(server), "since": server.round}

    def broadcast(self, server: Server):
        own = server.state
        return {"teacher": Cached(own["since"], own["teacher"])} if "teacher" in own else {}

    def start(self, client: Client) -> None:
        """The classes so far, and those among them that the current task has not."""
        seen = mask_of(client, competing(client))
        client.state = {"classes": seen, "old": seen & ~mask_of(client, task_classes(client))}

    def objective(self, step: Step) -> Tensor:
        """Algorithm 3"""
        classes, teacher = step.state["classes"], step.message.get("teacher")
        outputs = among(step.all_outputs, classes)
        targets = functional.one_hot(step.all_y, outputs.shape[1]).to(outputs.dtype) * classes
        if teacher is not None:
            old = torch.sigmoid(frozen_outputs(step, teacher, step.all_x))
            targets = torch.where(teacher["known"] & step.state["old"], old, targets)
        return binary(outputs, targets, classes).mean()

    # classification --------------------------------------------------------------------------------------------------
    def _sums(self, client: Client):
        """(classes, F) the sum of unit features over the client's exemplars, in float64; nothing without exemplars."""
        exemplars = memory.stored(client.of(memory.NAME))
        if len(exemplars) == 0:
            return {}
        self.check_head(client)
        sums = torch.zeros(head_weight(client.layout).shape, dtype=torch.float64)
        for found, y in feature_rows(client, exemplars):
            sums.index_add_(0, y.cpu(), functional.normalize(found.double(), dim=1).cpu())
        return {"sums": sums}

    def _classify_by_means(self, server: Server) -> None:
        """Algorithm 1 as a head. A class without exemplars is never predicted where the head has a bias."""
        sums = server.reduced.get("sums")
        if sums is None:
            return
        params = server.model["params"].clone()
        weight, *biases = head_entries(server.layout)
        server.state["head"] = {entry.name: entry.view(params).clone() for entry in (weight, *biases)}
        weight.view(params).copy_(functional.normalize(sums, dim=1))
        for bias in biases:
            bias.view(params).copy_(torch.where(sums.any(1), 0.0, OUT))
        server.model = {**server.model, "params": params}

    def _trained_head(self, server: Server) -> None:
        head = server.state.pop("head", None)
        if head is None:
            return
        params = server.model["params"].clone()
        for entry in head_entries(server.layout):
            entry.view(params).copy_(head[entry.name])
        server.model = {**server.model, "params": params}
