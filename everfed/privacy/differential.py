"""Differential privacy at the level of clients: replies are clipped, and noise hides any one of them.

Every value of a reply is scaled down to an L2 norm of `clip` at most; of the model it is the update that is clipped.
Then Gaussian noise of standard deviation noise x clip is added to every coordinate: by each client to its own reply
("local": no other party is trusted), or by the server to the sum ("central": the server is trusted, or sees sums only,
with secure aggregation; much less noise for the same privacy). All phases are protected and accounted for.

The noise is drawn with a key that is made at random once and kept with the state, so that a run that is resumed
releases the same numbers again and spends nothing twice.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed import (
    MODEL,
    CompositionError,
    Context,
    Message,
    Method,
    Optimizer,
    Part,
    Phase,
    Protection,
    Slots,
    State,
    Tree,
)
from everfed.core.client import Reply, synchronises
from everfed.core.context import World
from everfed.core.part import Reduced, Weights
from everfed.core.phase import EVALUATE, TRAIN
from everfed.core.reduce import Total
from everfed.privacy import accountant
from everfed.privacy.encoding import flat

NAME = "dp"
CENTRAL, LOCAL = "central", "local"
Means = Mapping[str, Mapping[str, bool]]  # phase -> "part/key" -> a mean (else a sum)?


class BudgetSpent(RuntimeError):
    """The next release would cost more than is left; nothing of it was released."""


@dataclass(frozen=True)
class DifferentialPrivacy(Protection):
    """kind: "central" or "local". noise: standard deviation in units of `clip`. clip: the largest L2 norm of a value.
    delta: at which epsilon is reported. budget: the epsilon that may be spent, 0 for any. seed: -1 for a secret key;
    any other makes the noise repeatable, for simulations, and protects nothing. means, model: `private` sets them."""

    kind: str = CENTRAL
    noise: float = 1.0
    clip: float = 1.0
    delta: float = 1e-5
    budget: float = 0.0
    seed: int = -1
    means: Means = field(default_factory=dict)
    model: str = ""

    name = NAME

    def __post_init__(self) -> None:
        if self.kind not in (CENTRAL, LOCAL):
            raise ValueError(f"kind must be 'central' or 'local'; got {self.kind!r}")
        if not (self.noise > 0 and self.clip > 0 and 0 < self.delta < 1 and self.budget >= 0):
            raise ValueError("noise and clip must be above 0, delta between 0 and 1, budget at least 0")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        accountant.check_installed()
        return ("privacy.dp.seed is set: the noise can be computed, and protects nothing",) if self.seed >= 0 else ()

    # on the client -----------------------------------------------------------------------------------------------
    def client_slots(self, ctx: Context) -> Tree:
        return {"key": self._new_key(f"client {ctx.client}")} if self.kind == LOCAL else {}

    def seal(self, client: State, phase: Phase, message: Message, reply: Reply, ctx: Context) -> tuple[None, Reply]:
        """Clip every value and, if local, add noise. Counts and losses are not protected, so they are not sent."""
        own = client.get(self.name, {})
        if phase.name == EVALUATE:
            return None, reply
        values: dict[str, Tree] = {}
        for path, value in flat(reply.values).items():
            part, key = path.split("/", 1)
            values.setdefault(part, {})[key] = self._protected(path, value, message, own, ctx)
        return None, Reply(values)

    def _protected(self, path: str, value: Any, message: Message, own: Tree, ctx: Context) -> Any:
        if isinstance(value, Tensor) and value.numel() == 0:
            return value
        if isinstance(value, Tensor) and not value.is_floating_point():
            raise CompositionError(f"privacy.dp: {path} is of whole numbers, which clipping and noise would spoil")
        base = message[MODEL]["params"] if path == self.model else None
        moved = torch.as_tensor(value, dtype=torch.float64) if base is None else value.double() - base.double()
        clipped = clip_norm(moved, self.clip)
        if self.kind == LOCAL:
            clipped = clipped + self._noise(own["key"], path, clipped, ctx) * self.noise * self.clip
        if not isinstance(value, Tensor):
            return float(clipped)
        return (clipped if base is None else clipped + base.double()).to(value.dtype)

    # on the server -----------------------------------------------------------------------------------------------
    def server_slots(self, ctx: Context) -> Tree:
        return {"key": self._new_key("server"), "spent": {}}

    def release(
        self, server: State, phase: Phase, reduced: Reduced, weights: Weights, ctx: Context
    ) -> tuple[Slots, Reduced]:
        """Account for what is about to be released; noise on sums and means, if central."""
        own, found = server[self.name], {p: v for p, v in flat(reduced).items() if not _empty(v)}
        known = self.means.get(phase.name, {})
        if not found or (phase.name == TRAIN and not synchronises(ctx)):
            return None, reduced
        spent = {**own["spent"], str(len(found)): own["spent"].get(str(len(found)), 0) + 1}
        after = self.spent(spent)
        if self.budget and after > self.budget:
            raise BudgetSpent(
                f"privacy.dp.budget = {self.budget:g}: phase {phase.name!r} of round {ctx.round} would raise epsilon "
                f"to {after:.3f}; {self.spent(own['spent']):.3f} is spent (delta = {self.delta:g})"
            )
        if self.kind == CENTRAL:
            noisy: Reduced = {part: dict(values) for part, values in reduced.items()}
            for path, value in found.items():
                part, key = path.split("/", 1)
                divisor = weights[part][key] if known[path] else 1.0
                noisy[part][key] = self._hidden(own["key"], path, value, self.noise * self.clip / divisor, ctx)
            reduced = noisy
        return {**own, "spent": spent}, reduced

    def spent(self, releases: Mapping[str, int]) -> float:
        """Epsilon at `delta`; of a client that took part in everything, if local."""
        sensitivity = 1.0 if self.kind == CENTRAL else 2.0
        return accountant.epsilon(self.noise, {int(k): n for k, n in releases.items()}, self.delta, sensitivity)

    def measure(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        return {"epsilon": self.spent(server[self.name]["spent"]), "delta": self.delta}

    def summary(self, server: State) -> dict[str, Any]:
        spent = server[self.name]["spent"]
        options = {"kind": self.kind, "noise": self.noise, "clip": self.clip}
        facts = {"releases": sum(spent.values()), "simulated": self.seed >= 0}
        return {"epsilon": self.spent(spent), "delta": self.delta, **options, **facts}

    # noise -------------------------------------------------------------------------------------------------------
    def _new_key(self, who: str) -> Tensor:
        key = secrets.token_bytes(32) if self.seed < 0 else hashlib.sha256(f"{self.seed} {who}".encode()).digest()
        return torch.frombuffer(bytearray(key), dtype=torch.uint8)

    def _hidden(self, key: Tensor, path: str, value: Any, scale: float, ctx: Context) -> Any:
        exact = torch.as_tensor(value).double()
        noisy = exact + self._noise(key, path, exact, ctx) * scale
        return noisy.to(value.dtype) if isinstance(value, Tensor) else float(noisy)

    def _noise(self, key: Tensor, path: str, like: Tensor, ctx: Context) -> Tensor:
        """Standard normal numbers of this key, place and path."""
        place = f"{ctx.round}/{ctx.phase}/{ctx.repeat}/{path}".encode()
        digest = hashlib.sha256(key.cpu().numpy().tobytes() + place).digest()
        rng = np.random.Generator(np.random.PCG64DXSM(int.from_bytes(digest, "little")))
        return torch.from_numpy(rng.standard_normal(tuple(like.shape))).to(like.device)


def clip_norm(value: Tensor, limit: float) -> Tensor:
    """Scaled down to an L2 norm of `limit` at most; untouched within. Raises ValueError on what is not finite."""
    norm = float(value.norm())
    if not math.isfinite(norm):
        raise ValueError("a reply that is not finite cannot be clipped")
    return value if norm <= limit else value * (limit / norm)


def _empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 0


def private(
    method: Method,
    kind: str = CENTRAL,
    noise: float = 1.0,
    clip: float = 1.0,
    delta: float = 1e-5,
    budget: float = 0.0,
    seed: int = -1,
) -> Method:
    """The method with differentially private phases. Raises CompositionError where it cannot have them."""
    means = {phase.name: _means(method, phase) for phase in method.scheduled_phases()}
    model = f"{method.aggregator.name}/params"
    part = DifferentialPrivacy(kind, noise, clip, delta, budget, seed, means, model)
    return Method(method.name, (*method.parts, part), (*method.warnings, *part.check(method.parts, Optimizer())))


def _means(method: Method, phase: Phase) -> dict[str, bool]:
    found = {}
    for part, keys in method.reducers(phase).items():
        for key, reducer in keys.items():
            total = reducer.start()
            if not isinstance(total, Total):
                raise CompositionError(
                    f"privacy.dp: method {method.name!r} cannot have it: in phase {phase.name!r} the server needs "
                    f"every client's own {part}/{key}, not their sum"
                )
            if total.weighted:
                raise CompositionError(
                    f"privacy.dp: {part}/{key} is weighed by samples, so one client could weigh more than the noise "
                    "hides; choose weighting = 'uniform' or another method"
                )
            found[f"{part}/{key}"] = total.mean
    return found


def check_world(world: World) -> None:
    """Refuse models and training options that would send unprotected values. Raises CompositionError."""
    if not any(part.name == NAME for part in world.method.parts):
        return
    if world.options.sync_every > 1:
        raise CompositionError(
            "privacy.dp needs train.sync_every = 1: updates are clipped against the model of the round"
        )
    if world.facts.layout.stats and world.options.batchnorm != "local":
        raise CompositionError(
            "privacy.dp: the model has BatchNorm statistics, which would be sent; set model.batchnorm = 'local'"
        )
