"""GLFC: global-local forgetting compensation with exemplars of real samples (Dong et al., CVPR 2022).

Clients train on their data and their exemplars with binary cross-entropy of every output s_ic against targets Y,

    L_GC = mean_ic w_i BCE(s_ic, Y_ic),  w_i = g_i / mean of g over the samples of i's group,  g_i = |sigma(s_i)_y - 1|
    L_RD = mean_ic BCE(s_ic, Y'_ic),     Y' = sigma(old model) on the classes it was trained on, Y on others
    L    = 0.5 L_GC + 0.5 L_RD           (L_GC alone without an old model)

where the groups are samples of learned classes and all others, so that old classes keep their weight though they have
few samples. The memory holds the exemplars and detects changes of task (`transition.py`).

LGA ("No One Left Behind: Real-World Federated Class-Incremental Learning", Dong et al., TPAMI 2023), by its code:

    w_i = g_i^z / mean of g^z over the samples of i's group, in [0.5, 5],  z = t / (t + 1) after t tasks; 1 for t = 0

where the groups are the learned classes of every earlier task, and all others. L_RD has the same weights;
L = L_GC + L_RD.

The old model is that of the last task's end, or chosen by a proxy server: clients whose task changed send gradients of
perturbed prototypes (`prototypes.py`), the server reconstructs images from them, and the best model on these is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from everfed.core import random
from everfed.core.replica import initial_weights
from everfed.method import (
    BOUNDARIES,
    CLASSES,
    END,
    Cached,
    Client,
    Cohort,
    Collect,
    Data,
    Facts,
    Part,
    Phase,
    Server,
    Step,
    Tree,
    option,
)
from everfed.methods.common.layers import in_precision
from everfed.methods.common.teacher import (
    among,
    binary,
    classes_of,
    competing,
    frozen_outputs,
    knowing,
    mask_of,
    tasks_before,
)
from everfed.methods.generative.prototypes import (
    EncoderBlueprint,
    encoded,
    label_of,
    nearest_to_mean,
    perturbed,
    reconstructed,
)
from everfed.methods.replay import memory

_MANY = 100_000  # the most prototypes of one round


@dataclass(frozen=True)
class GLFC(Part):
    compensation: float = option(0.5, at_least=0, about="weight of L_GC")
    relation: float = option(0.5, at_least=0, about="weight of L_RD")
    weights: str = option(
        "glfc", one_of=("glfc", "lga"), about="w: groups of learned classes and others; or LGA's groups, power and clip"
    )
    old_model: str = option(
        "last",
        one_of=("last", "proxy", "none"),
        about="of the last task's end, chosen by a proxy server, or none",
    )
    form: str = option(
        "sigmoid",
        one_of=("sigmoid", "softmax"),
        about="sigmoid (code), or softmax: cross-entropy and divergence over classes (paper)",
    )
    head: str = option(
        "seen",
        one_of=("seen", "full"),
        about="the loss is over the classes seen so far, as if the head grew, or over its full width",
    )
    # with a proxy
    perturbation: int = option(50, at_least=0, about="steps that change a prototype before it is encoded")
    perturbation_lr: float = option(0.2, at_least=0, about="their rate")
    reconstruction: int = option(250, at_least=0, about="steps of the search for a prototype's image")
    reconstruction_lr: float = option(0.1, at_least=0, about="their rate")
    iterates: int = option(20, at_least=1, about="how many of the search's last images are kept")
    reset: bool = option(
        True, about="the best score begins at 0 again at a change of task (code: never, so a choice can freeze)"
    )

    name = "glfc"

    def needs(self):
        """Boundaries only for a head that grows and for the model of a task's end; otherwise clients detect changes."""
        known = self.head == "seen" or self.old_model == "last" or self.weights == "lga"
        return {memory.NAME, CLASSES, *([BOUNDARIES] if known else [])}

    # the old model, on the server ----------------------------------------------------------------------------------
    def init(self, side: Client | Server) -> None:
        if isinstance(side, Server) and self.old_model == "proxy":
            weights = initial_weights(_blueprint(side.facts), random.key(side.seed, "glfc/encoder"))["params"]
            side.state = {"encoder": weights, "best": 0.0, "reached": 0}

    def phases(self):
        """An old model is of no use after the last round."""
        on_server = partial(Phase, cohort=Cohort.SERVER, in_last_round=False)
        if self.old_model == "last":
            return (on_server("teacher", rounds=END, update=self._freeze),)
        if self.old_model == "none":
            return ()
        collect = Collect(tells="gradients of one sample a class, from which the server makes images of it")
        reduce, send, note = {"gradients": collect}, self._send, self._transition
        return (
            Phase("prototypes", reduce=reduce, in_last_round=False, sends=False, run=send, update=note),
            on_server("reconstruct", repeat=_MANY, update=self._reconstruct),
            on_server("choose", update=self._choose),
        )

    def _freeze(self, server: Server) -> None:
        server.state = {"old": knowing(server), "since": server.round}

    def _transition(self, server: Server) -> None:
        """If the task of some clients has changed, the best model becomes the old one, and new images are needed. A
        signal that comes late, when the best model is one of the current task, leaves the old one as it is."""
        if not server.reduced.get("gradients"):
            return
        own = server.state
        own["queue"] = torch.cat(list(server.reduced["gradients"].values()))
        for gone in ("images", "labels"):
            own.pop(gone, None)
        if "current" in own and not _same_task(own["current_task"], server):
            _retire(own)
        if self.reset:
            own["best"] = 0.0

    def _reconstruct(self, server: Server) -> bool:
        """The images of one prototype of the queue; True when every prototype of this round has its images."""
        own, device = server.state, server.device
        if "queue" not in own:
            return True
        encoder = server.trainer.auxiliary(_blueprint(server.facts))
        weights = encoder.layout.named(own["encoder"].to(device))
        gradient, rest = own["queue"][0].to(device), own.pop("queue")[1:]
        label = label_of(gradient, encoder.layout)
        noise = server.rng("noise").standard_normal(server.facts.input_shape, dtype=np.float32)
        images, _ = reconstructed(
            lambda x: encoded(encoder.module, weights, x, label, differentiable=True),
            gradient,
            torch.from_numpy(noise).to(device),
            self.reconstruction,
            self.reconstruction_lr,
            self.iterates,
        )
        made = {"images": images.cpu(), "labels": label.cpu().repeat(len(images))}
        own |= {k: torch.cat([own[k], new]) if k in own else new for k, new in made.items()}
        if len(rest):
            own["queue"] = rest.clone()
        return not len(rest)

    def _choose(self, server: Server) -> None:
        """The new model becomes the best if none was better on the images; one of an earlier task that it replaces is
        the old one from then on, whether or not a signal came."""
        own, trainer = server.state, server.trainer
        if "images" not in own:
            if "score" in own:
                server.report("prototype_accuracy", own["score"])
            return
        trainer.replica.load(server.model)
        trainer.replica.module.eval()
        known = competing(server).to(trainer.device)
        with torch.no_grad():
            outputs = trainer.forward_inputs(own["images"].to(trainer.device)).index_select(1, known)
        right = (known[outputs.argmax(1)] == own["labels"].to(trainer.device)).sum().item() / len(outputs)
        own["score"] = right
        server.report("prototype_accuracy", right)
        if right < own["best"]:
            return
        if server.task is not None and own.get("current_task", _task(server)) != _task(server):
            _retire(own)
        own |= {"current": knowing(server), "current_since": server.round, "current_task": _task(server)}
        own["best"] = right

    def sample(self, server: Server, count: int) -> tuple[Tensor, Tensor]:
        """The next `count` images reconstructed from clients' gradients, and the labels read off these."""
        own = server.state
        if self.old_model != "proxy":
            raise ValueError(f"method.glfc.old_model = {self.old_model!r} makes no images; only 'proxy' does")
        if "images" not in own:
            raise ValueError("no prototypes have arrived yet: clients send them when they detect a change of task")
        here = slice(server.repeat * count, (server.repeat + 1) * count)
        return own["images"][here].to(server.device), own["labels"][here].to(server.device)

    def broadcast(self, server: Server):
        own = server.state
        since = {"previous": "previous_since", "current": "current_since", "old": "since"}
        message = {key: Cached(own[version], own[key]) for key, version in since.items() if key in own}
        task = {"task": own["current_task"]} if "current" in own else {}
        encoder = {"encoder": Cached(0, own["encoder"])} if "encoder" in own else {}
        return {**message, **task, **encoder}

    # on the client -----------------------------------------------------------------------------------------------
    def start(self, client: Client) -> None:
        """The inputs of the loss: the outputs that compete, the learned classes, the old model."""
        host = client.of(memory.NAME)["host"]
        everything = torch.arange(client.facts.classes)
        classes = competing(client) if self.head == "seen" else everything
        learned = host.get("learned", torch.zeros(0, dtype=torch.int64))
        own: Tree = {"learned": mask_of(client, learned), "classes": mask_of(client, classes)}
        if self.weights == "lga":
            own["task"] = torch.zeros(client.facts.classes, dtype=torch.int64)  # of every learned class, from 1
            for task in tasks_before(client):
                own["task"][classes_of(client, [task], everyone=True)] = task + 1
            own["task"] *= own["learned"]
            own["power"] = torch.tensor(client.task / (client.task + 1) if client.task else 1.0)
        old = self._old(client, bool(host.get("signal", False)))
        if old is not None and self.relation:
            own["old"] = old
        if "encoder" in client.message:
            own["encoder"] = client.message["encoder"]
        client.state = own

    def _old(self, client: Client, signal: bool) -> Tree | None:
        """From a proxy: the best model so far for a client that just detected a change of task (signal), unless that is
        one of its current task; the best of the task before for the others."""
        received = client.message
        if self.old_model != "proxy":
            return received.get("old")
        if signal and "current" in received and not _same_task(received["task"], client):
            return received["current"]
        return received.get("previous")

    def objective(self, step: Step) -> Tensor:
        own = step.state
        classes, outputs = own["classes"], among(step.all_outputs, own["classes"])
        targets = functional.one_hot(step.all_y, outputs.shape[1]).to(outputs.dtype) * classes
        weights = self._weights(own, self._confidence(outputs, targets), step.all_y)
        compensated = (weights * self._distance(outputs, targets, classes)).mean()
        if "old" not in own:
            return compensated
        related = self._distance(outputs, self._relations(step, targets), classes)
        related = weights * related if self.weights == "lga" else related
        return self.compensation * compensated + self.relation * related.mean()

    def _weights(self, own: Mapping[str, Tensor], confidence: Tensor, y: Tensor) -> Tensor:
        if self.weights == "lga":
            return adaptive_weights(confidence, own["task"][y], own["power"], own["learned"].any(), len(own["task"]))
        return class_weights(confidence, own["learned"][y], own["learned"].any())

    def _confidence(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(n,) the probability of the true class."""
        p = torch.sigmoid(outputs) if self.form == "sigmoid" else functional.softmax(outputs, dim=1)
        return (p.detach() * targets).sum(1)

    def _distance(self, outputs: Tensor, targets: Tensor, classes: Tensor) -> Tensor:
        """(n,) distance of every sample's outputs from its targets: the mean binary cross-entropy over the classes of a
        mask, or the divergence of distributions (for one-hot targets, cross-entropy)."""
        if self.form == "sigmoid":
            return binary(outputs, targets, classes)
        return functional.kl_div(functional.log_softmax(outputs, dim=1), targets, reduction="none").sum(1)

    def _relations(self, step: Step, targets: Tensor) -> Tensor:
        """(n, outputs) targets, replaced by the old model's outputs at the classes it was trained on."""
        own = step.state
        old, known = frozen_outputs(step, own["old"], step.all_x), own["old"]["known"] & own["classes"]
        if self.form == "sigmoid":
            return torch.where(known, torch.sigmoid(old), targets)
        mixed = torch.where(known, functional.softmax(among(old, known), dim=1), targets)
        return mixed / mixed.sum(1, keepdim=True)

    def reply(self, client: Client):
        """A client that detected a change of task makes its prototypes, to be sent in a phase of their own."""
        own, host, data = client.state, client.of(memory.NAME)["host"], client.data
        client.state = {"learned": own["learned"]}
        if "encoder" in own and host.get("signal", False):
            settled = int(host["stored"]) - int(host["staged"])
            current = data.take(np.flatnonzero(~np.isin(data.ids, host["ids"][:settled].numpy())))
            client.state["prototypes"] = self._prototypes(client, own, current)

    def _prototypes(self, client: Client, own: Mapping[str, Tensor], data: Data) -> Tensor:
        """(k, E) for every current class, the gradient of its perturbed prototype."""
        trainer, device, model = client.trainer, client.device, client.model
        rows = nearest_to_mean(trainer, model, data.x, data.y).to(data.x.device)
        y, classes = data.y[rows].to(device), own["classes"].nonzero().flatten().to(device)
        inputs = trainer.stream.inputs(data.x[rows].to(device))
        with in_precision(trainer):
            images = perturbed(trainer, model, inputs, y, classes, self.perturbation, self.perturbation_lr)
        encoder = trainer.auxiliary(_blueprint(client.facts))
        weights = encoder.layout.named(own["encoder"].to(device))
        return torch.stack([encoded(encoder.module, weights, x, label) for x, label in zip(images, y, strict=True)])

    def _send(self, client: Client):
        """Send the prototypes, if there are any, and forget them."""
        return {"gradients": client.state.pop("prototypes")} if "prototypes" in client.state else {}


def class_weights(confidence: Tensor, learned: Tensor, any_learned: Tensor) -> Tensor:
    """(n,) w_i: a sample's distance from its label, over the mean of its group (learned classes, others).

    confidence: (n,) probability of the true class. learned: (n,) bool. All ones while no class is learned.
    """
    g = (confidence - 1.0).abs()
    weights = torch.zeros_like(g)
    for group in (learned, ~learned):
        mean = (g * group).sum() / group.sum().clamp(min=1)
        weights = weights + group * g / mean.clamp(min=torch.finfo(g.dtype).tiny)
    return torch.where(any_learned, weights, torch.ones_like(weights))


def adaptive_weights(confidence: Tensor, group: Tensor, power: Tensor, any_learned: Tensor, most: int) -> Tensor:
    """(n,) LGA's w_i. group: (n,) 0 for a class that is not learned, else from 1 its task, `most` at most."""
    g = (confidence - 1.0).abs() ** power
    sums, counts = (g.new_zeros(most + 1).index_add(0, group, values) for values in (g, torch.ones_like(g)))
    mean = (sums / counts.clamp(min=1))[group]
    weights = (g / mean.clamp(min=torch.finfo(g.dtype).tiny)).clamp(0.5, 5.0)
    return torch.where(any_learned, weights, torch.ones_like(weights))


def _blueprint(facts: Facts) -> EncoderBlueprint:
    return EncoderBlueprint(facts.input_shape, facts.classes)


def _task(server: Server) -> int:
    """The current task; -1 when tasks are hidden."""
    return -1 if server.task is None else server.task


def _same_task(task: int, side: Client | Server) -> bool:
    """Is a model chosen in `task` one of the current task? False where tasks are hidden: then signals alone count."""
    return side.task is not None and task == side.task


def _retire(own: Tree) -> None:
    """The best model so far becomes the previous one."""
    own |= {"previous": own["current"], "previous_since": own["current_since"]}
