"""FL+OGD: orthogonal gradient descent on every client (Farajtabar et al., 2020, variant OGD-GTL; federated as in the
FedSSI paper).

After a task each client draws a few samples and keeps the directions in which their true-class logits change, as an
orthonormal basis Q. In later tasks it moves at right angles to all of them:

    g <- g - Q^T Q g          (rows of Q: unit vectors)

With any optimiser but plain SGD the step is no longer along -g, so then the step itself is projected.

Memory: `vectors` x parameters x 4 bytes for every finished task; `storage` halves it. `max_vectors` bounds it: then the
rows of Q are the top right singular vectors of the old rows, each at its singular value, stacked with the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from everfed.core.tree import on_device
from everfed.method import (
    CLASSES,
    END,
    Client,
    Cohort,
    CompositionError,
    Data,
    Gradient,
    Optimizer,
    Part,
    Phase,
    Schedule,
    Step,
    option,
    overrides,
)
from everfed.methods.replay.diversity import column_blocks

STORAGE = {"float32": torch.float32, "float16": torch.float16}
_BLOCK = 1 << 22  # numbers of a float16 basis that are widened at once
_DEPENDENT = 1e-4  # a direction of which less than this share is new is not kept


@dataclass(frozen=True)
class OGD(Part):
    vectors: int = option(20, at_least=1, about="samples whose gradients are kept per task")
    storage: str = option(
        "float32", one_of=tuple(STORAGE), about="float16 halves the memory; orthogonal to about 1e-3 then"
    )
    max_vectors: int = option(
        0, at_least=0, about="directions in all, at most: those that hold most of the gradients' energy; 0: no limit"
    )
    project: str = option(
        "auto",
        one_of=("auto", "gradient", "update"),
        about="the gradient, or the update that the optimiser makes; auto: the gradient for plain SGD without weight "
        "decay, the update otherwise",
    )

    name = "ogd"
    changes = frozenset({"before"})  # the basis is large and stays as it is

    def needs(self):
        return {CLASSES}

    def check(self, parts, optimizer):
        later = [p.name for p in parts[list(parts).index(self) + 1 :] if overrides(p, "gradient")]
        if later and self.project != "update":
            raise CompositionError(
                f"{', '.join(later)} changes the gradient after ogd has projected it; set ogd.project = 'update'"
            )
        if self.project == "gradient" and optimizer.kind != "sgd":
            return (f"ogd.project = 'gradient' with optimizer {optimizer.kind!r}: its steps are not orthogonal",)
        return ()

    # building the basis ------------------------------------------------------------------------------------------
    def phases(self):
        return [Phase("basis", Cohort.BOUNDARY, END, in_last_round=False, run=self.extend)]

    def extend(self, client: Client) -> None:
        data = client.data
        if len(data) == 0:
            return
        own = on_device(client.state, client.device)
        gradients = logit_gradients(client, data.take(client.rng("basis").permutation(len(data))[: self.vectors]))
        nothing = torch.zeros((0, client.layout.size), device=client.device)
        basis = widened(own["basis"]) if "basis" in own else nothing
        if not self.max_vectors:
            client.state = {"basis": self._stored(reduce(extended, gradients, basis))}
            return
        values = own.get("values", nothing.new_zeros(0))
        basis, values = principal(torch.stack([*(basis * values.unsqueeze(1)), *gradients]), self.max_vectors)
        client.state = {"basis": self._stored(basis), "values": values}

    def _stored(self, rows: Tensor) -> Tensor:
        # scaled by sqrt(P): a unit vector's entries are near 1 / sqrt(P), where float16 has lost its digits
        return rows if self.storage == "float32" else (rows * rows.shape[1] ** 0.5).to(STORAGE[self.storage])

    # using it ----------------------------------------------------------------------------------------------------
    def on_update(self, optimizer: Optimizer) -> bool:
        """Is the optimiser's step projected, rather than the gradient?"""
        if self.project == "auto":
            return optimizer.kind != "sgd" or optimizer.weight_decay > 0 or bool(optimizer.groups)
        return self.project == "update"

    def plan(self, client: Client, schedule: Schedule) -> None:
        if "basis" in client.state and self.on_update(client.options.optimizer):
            client.state["before"] = torch.zeros(client.layout.size)

    def gradient(self, step: Step, gradient: Gradient) -> Gradient | Tensor:
        own = step.state
        if "before" in own:
            own["before"].copy_(step.params)
            return gradient
        return project_out(gradient.vector, own["basis"]) if "basis" in own else gradient

    def after(self, step: Step) -> None:
        own = step.state
        if "before" in own:
            step.params.copy_(own["before"] + project_out(step.params - own["before"], own["basis"]))

    def reply(self, client: Client) -> None:
        client.state.pop("before", None)


def logit_gradients(client: Client, data: Data) -> Iterator[Tensor]:
    """(P,) gradient of each sample's true-class logit at the client's model, in eval mode."""
    trainer = client.trainer
    replica = trainer.replica
    replica.load(client.model)
    replica.module.eval()
    for x, y in zip(data.x.to(trainer.device), data.y.tolist(), strict=True):
        logit = trainer.forward(x.unsqueeze(0))[0, y]
        grads = torch.autograd.grad(logit, replica.trainable, materialize_grads=True)
        yield replica.layout.flatten_gradient(grads)


def extended(basis: Tensor, vector: Tensor) -> Tensor:
    """An orthonormal basis (k, P) with what is new in `vector`; Gram-Schmidt, twice, since once loses digits."""
    rest = project_out(project_out(vector, basis), basis)
    length = rest.norm()
    return basis if length <= _DEPENDENT * vector.norm() else torch.cat([basis, (rest / length).unsqueeze(0)])


def principal(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(at most `most` top right singular vectors of rows (n, P), their singular values), by the small Gram matrix."""
    gram = sum((block @ block.T for block in column_blocks(rows)), rows.new_zeros((), dtype=torch.float64))
    squares, weights = torch.linalg.eigh(gram)
    values = squares.flip(0)[:most].clamp_min(0.0).sqrt()
    values = values[values > _DEPENDENT * values[0]]
    directions = (weights.flip(1)[:, : len(values)] / values).T.to(rows.dtype) @ rows
    # orthonormal to the last digit: dividing by a small singular value magnifies rounding
    return torch.linalg.qr(directions.T)[0].T.contiguous(), values.to(rows.dtype)


def project_out(vector: Tensor, basis: Tensor) -> Tensor:
    """vector (P,) without its part in the span of the basis (k, P), which is in storage form."""
    if basis.dtype == torch.float32:
        return vector - (basis @ vector) @ basis
    blocks = [slice(i, i + _BLOCK // max(len(basis), 1)) for i in range(0, len(vector), _BLOCK // max(len(basis), 1))]
    coefficients = torch.stack([basis[:, block].float() @ vector[block] for block in blocks]).sum(0) / len(vector)
    return torch.cat([vector[block] - coefficients @ basis[:, block].float() for block in blocks])


def widened(basis: Tensor) -> Tensor:
    """A stored basis as unit rows in float32."""
    return basis if basis.dtype == torch.float32 else basis.float() / basis.shape[1] ** 0.5
