"""Differential privacy at the level of clients: replies are clipped, and noise hides any one of them.

Every value of a reply is scaled down to an L2 norm of `clip` at most; of the model it is the update that is clipped.
Then Gaussian noise of standard deviation noise x clip is added to every coordinate: by each client to its own reply
("local": no other party is trusted), or by the server to the sum ("central": the server is trusted, or sees sums only,
with secure aggregation; much less noise for the same privacy). All phases are protected and accounted for.

The noise is a function of a secret key, made at random once and kept with the state, and of what it hides: the values
themselves and, on a client, every message that it has received up to then. A run that is resumed computes the same
values from the same messages, so it releases the same numbers again, which reveals nothing new and is counted once.
Anything else, such as the same place asked again with another model or a sum over another set of clients, gets fresh
noise and is a further release; the ledgers (`everfed.privacy.spending`) count it.

A value that is not finite counts as zero: whether a model overflows on a client's samples depends on the samples, so
nothing but noise may tell. Real clients answer a step that failed likewise (`nothing`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.context import Setup
from everfed.core.handle import Handle
from everfed.core.option import NoiseOptions
from everfed.core.part import Reduced, Weights, options_of
from everfed.core.phase import EVALUATE, TRAIN, Total
from everfed.errors import Fault
from everfed.method import (
    MODEL,
    Client,
    CompositionError,
    Method,
    Optimizer,
    Part,
    Phase,
    Protection,
    Server,
    State,
    Tree,
)
from everfed.privacy import accountant
from everfed.privacy.encoding import NUMBER, flat, form_of
from everfed.privacy.gaussian import standard_normal, tree_digest

NAME = "dp"
CENTRAL, LOCAL = "central", "local"
_LOG = logging.getLogger("everfed.privacy")
Means = Mapping[str, Mapping[str, bool]]  # phase -> "part/key" -> a mean (else a sum)?


class BudgetSpent(Fault):
    """The next release would cost more than is left; nothing of it was released."""


@dataclass(frozen=True)
class DifferentialPrivacy(Protection, NoiseOptions):
    """A seed makes the noise a function of seed and place alone, so that simulations on different engines can be
    compared; it then protects nothing. means, model: `private` sets them."""

    means: Means = field(default_factory=dict)
    model: str = ""

    name = NAME

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        accountant.check_installed()
        return ("privacy.dp.seed is set: the noise can be computed, and protects nothing",) if self.seed >= 0 else ()

    def init(self, side: Client | Server) -> None:
        """Server: spent is {number of values: releases}; release, values: of the last one, for the ledger of the run.
        Client: history is the digest of all messages so far; release, multiplier: of the last reply, for its ledger;
        forms: of its last reply to each phase, where it adds noise itself."""
        if isinstance(side, Server):
            side.state = {"key": self._new_key("server"), "spent": {}, "release": "", "values": 0}
            return
        key = {"key": self._new_key(f"client {side.id}")} if self.kind == LOCAL else {}
        side.state = {**key, "history": _to_tensor(bytes(32)), "release": "", "multiplier": 0.0}

    # on the client -----------------------------------------------------------------------------------------------
    def seal(self, client: Client, phase: Phase, reply: Reply) -> Reply:
        """Clip every value and, if local, add noise. Counts and losses are not protected, so they are not sent; nor are
        scores on the client's own tests."""
        if "history" not in client.state:  # a server that resumed its run under another recipe
            self.init(client)
        if self.kind == LOCAL and phase.name == TRAIN and client.synchronises and not flat(reply.values):
            reply = self.nothing(client, phase)  # hides whether it has samples in this period
        own, message = client.state, client.messages
        own["history"] = _to_tensor(tree_digest({"message": message, "history": own["history"]}, _place(client)))
        sent = {} if phase.name == EVALUATE else flat(reply.values)
        clipped = {path: self._clipped(path, value, message) for path, value in sent.items() if not _empty(value)}
        content = tree_digest({"values": clipped, "history": own["history"], "key": own.get("key")}, _place(client))
        values: dict[str, Tree] = {}
        for path, value in sent.items():
            part, key = path.split("/", 1)
            values.setdefault(part, {})[key] = (
                self._sent(path, value, clipped[path], content, client) if path in clipped else value
            )
        own |= {"release": content.hex() if clipped else "", "multiplier": self.multiplier(len(clipped))}
        if self.kind == LOCAL:
            own["forms"] = {**own.get("forms", {}), phase.name: json.dumps(form_of(reply.values))}
        return Reply(values)

    def nothing(self, client: Client, phase: Phase) -> Reply:
        """The reply to a step that failed, or of a client without samples, before it is sealed: of the form of the last
        one, or of the model, and no number in it. As values that are not finite these count as zero."""
        form = json.loads(client.state.get("forms", {}).get(phase.name, "{}"))
        if phase.name == TRAIN and MODEL in client.messages:
            aggregator, sent = self.model.partition("/")[0], client.messages[MODEL]
            for key in ("params",) if client.options.batchnorm == "local" else tuple(sent):
                form[f"{aggregator}/{key}"] = [str(sent[key].dtype).removeprefix("torch."), list(sent[key].shape)]
        values: dict[str, Tree] = {}
        for path, (kind, shape) in form.items():
            part, key = path.split("/", 1)
            blank = math.nan if kind == NUMBER else torch.zeros(shape, dtype=getattr(torch, kind))
            whole = isinstance(blank, Tensor) and not blank.is_floating_point()
            values.setdefault(part, {})[key] = blank if whole else blank + math.nan
        return Reply(values)

    def most_values(self, phase: Phase) -> int:
        """How many values a reply to the phase may hold. Statistics of the aggregating part are empty (`check_setup`);
        scores on a client's own tests are not sent."""
        aggregator = self.model.partition("/")[0]
        empty = {f"{aggregator}/stats", f"{aggregator}/counters"}
        return len(set(self.means.get(phase.name, {})) - empty)

    def _clipped(self, path: str, value: Any, message: Mapping[str, Any]) -> Tensor:
        """In float64; of the model, the update."""
        if isinstance(value, Tensor) and not value.is_floating_point():
            raise CompositionError(f"privacy.dp: {path} is of whole numbers, which clipping and noise would spoil")
        if path == self.model:
            return clip_norm(value.double() - message[MODEL]["params"].double(), self.clip)
        return clip_norm(torch.as_tensor(value, dtype=torch.float64), self.clip)

    def _sent(self, path: str, value: Any, clipped: Tensor, content: bytes, client: Client) -> Any:
        """In the form in which the part sends it."""
        if self.kind == LOCAL:
            clipped = clipped + self._noise(client, content, path, clipped) * self.noise * self.clip
        if not isinstance(value, Tensor):
            return float(clipped)
        return (clipped + client.received["params"].double() if path == self.model else clipped).to(value.dtype)

    def multiplier(self, values: int) -> float:
        """The noise of a release of so many values in units of its sensitivity; 0 for no release."""
        return accountant.multiplier(self.noise, values, self.sensitivity) if values else 0.0

    @property
    def sensitivity(self) -> float:
        """In units of the clip: a client is there or not, or its reply is exchanged for another."""
        return 1.0 if self.kind == CENTRAL else 2.0

    # on the server -----------------------------------------------------------------------------------------------
    def release(self, server: Server, phase: Phase, reduced: Reduced, weights: Weights) -> Reduced:
        """Account for what is about to be released; noise on sums and means, if central."""
        released = self._released(server, phase, reduced, weights)
        server.report("epsilon", self.spent(server.state["spent"]))
        server.report("delta", self.delta)
        return released

    def _released(self, server: Server, phase: Phase, reduced: Reduced, weights: Weights) -> Reduced:
        own, found = server.state, {p: v for p, v in flat(reduced).items() if not _empty(v)}
        if not found or (phase.name == TRAIN and not server.synchronises):
            return reduced
        spent = {**own["spent"], str(len(found)): own["spent"].get(str(len(found)), 0) + 1}
        after = self.spent(spent)
        if self.budget and after > self.budget:
            raise BudgetSpent(
                f"privacy.dp.budget = {self.budget:g}: phase {phase.name!r} of round {server.round + 1} would raise "
                f"epsilon to {after:.3f}; {self.spent(own['spent']):.3f} is spent (delta = {self.delta:g})"
            )
        counts = {path: _weight(weights, path) for path in found}
        content = tree_digest({"values": found, "counts": counts, "key": own["key"]}, _place(server))
        if self.kind == CENTRAL:
            noisy: Reduced = {part: dict(values) for part, values in reduced.items()}
            for path, value in found.items():
                part, key = path.split("/", 1)
                scale = self.noise * self.clip / (counts[path] if self.means[phase.name][path] else 1.0)
                exact = torch.as_tensor(value).double()
                hidden = exact + self._noise(server, content, path, exact) * scale
                noisy[part][key] = hidden.to(value.dtype) if isinstance(value, Tensor) else float(hidden)
            reduced = noisy
        own |= {"spent": spent, "release": content.hex(), "values": len(found)}
        return reduced

    def spent(self, releases: Mapping[str, int]) -> float:
        """Epsilon at `delta`; of a client that took part in everything, if local."""
        return accountant.epsilon(self.noise, {int(k): n for k, n in releases.items()}, self.delta, self.sensitivity)

    def summary(self, server: State) -> dict[str, Any]:
        spent = server[self.name]["spent"]
        options = {"kind": self.kind, "noise": self.noise, "clip": self.clip}
        facts = {"releases": sum(spent.values()), "simulated": self.seed >= 0}
        return {"epsilon": self.spent(spent), "delta": self.delta, **options, **facts}

    # noise -------------------------------------------------------------------------------------------------------
    def _new_key(self, who: str) -> Tensor:
        key = secrets.token_bytes(32) if self.seed < 0 else hashlib.sha256(f"{self.seed} {who}".encode()).digest()
        return _to_tensor(key)

    def _noise(self, side: Handle, content: bytes, path: str, like: Tensor) -> Tensor:
        """Standard normal numbers of this side's key, release and path."""
        release = content if self.seed < 0 else _place(side).encode()
        numbers = standard_normal(_to_bytes(side.state["key"]), release + path.encode(), like.numel())
        return torch.from_numpy(numbers).reshape(like.shape).to(like.device)


def _place(side: Handle) -> str:
    return f"{side.round}/{side.phase}/{side.repeat}"


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _weight(weights: Weights, path: str) -> float:
    """How many replies are in the sum, or their weights together."""
    part, key = path.split("/", 1)
    return float(weights.get(part, {}).get(key, 0.0))


def clip_norm(value: Tensor, limit: float) -> Tensor:
    """Scaled down to an L2 norm of `limit` at most; untouched within. Zero for what is not finite."""
    norm = float(value.norm())
    if not math.isfinite(norm):
        _LOG.warning("a value of a reply is not finite and counts as zero")
        return torch.zeros_like(value)
    return value if norm <= limit else value * (limit / norm)


def _empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 0


def private(method: Method, **options: Any) -> Method:
    """The method with differentially private phases. Raises CompositionError where it cannot have them."""
    means = {phase.name: _means(method, phase) for phase in method.scheduled_phases()}
    model = f"{method.aggregator.name}/params"
    part = DifferentialPrivacy(**options, means=means, model=model)
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
                    f"hides; {_remedy(method, part)}"
                )
            found[f"{part}/{key}"] = total.mean
    return found


def _remedy(method: Method, name: str) -> str:
    """The key to set; a part whose weights belong to the method has none."""
    part = next(part for part in method.parts if part.name == name)
    if "weighting" in options_of(part):
        return f"set method.{name}.weighting = 'uniform', or choose another method"
    return f"part {name!r} has no other weights; choose another method"


def check_setup(setup: Setup) -> None:
    """Refuse models and training options that would send unprotected values. Raises CompositionError."""
    if not any(part.name == NAME for part in setup.method.parts):
        return
    if setup.options.sync_every > 1:
        raise CompositionError(
            "privacy.dp needs train.sync_every = 1: updates are clipped against the model of the round"
        )
    if setup.facts.layout.stats and setup.options.batchnorm != "local":
        raise CompositionError(
            "privacy.dp: the model has BatchNorm statistics, which would be sent; set model.batchnorm = 'local'"
        )
