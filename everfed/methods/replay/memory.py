"""Memory: the one replay buffer of a client, shared by every part that replays.

Its policy decides what it holds: the reservoir over the client's whole life by default, or one of `POLICIES`, most of
which choose once, at the end of a task, from its samples and the stored ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import take_rows
from everfed.method import CLASSES, Batch, Client, Data, Part, Schedule, Server, Step, Table, Tree, option
from everfed.methods.replay.coordinated import Coordinated, Uncoordinated
from everfed.methods.replay.gss import GSSCluster, GSSGreedy
from everfed.methods.replay.herding import Herding
from everfed.methods.replay.policy import NAME, Policy, Pool
from everfed.methods.replay.random_selection import ApproximateUniform, FixedProportion, NaiveUniform
from everfed.methods.replay.refed import ReFed
from everfed.methods.replay.reservoir import Reservoir
from everfed.methods.replay.sample_gradients import GradientOptions
from everfed.methods.replay.transition import OnTransition
from everfed.naming import load_object, with_options

POLICIES: Mapping[str, type[Policy]] = {
    policy.kind: policy
    for policy in (
        Reservoir,
        NaiveUniform,
        ApproximateUniform,
        FixedProportion,
        Herding,
        OnTransition,
        GSSGreedy,
        GSSCluster,
        Uncoordinated,
        Coordinated,
        ReFed,
    )
}


@dataclass(frozen=True)
class Memory(Part):
    """What clients store. In Python a policy may also be an object of `Policy` or its class."""

    size: int = option(200, at_least=0, about="B, samples per client")
    logits: bool = option(False, about="keep the outputs that a sample had when it was stored (DER)")
    offer: str = option(
        "first_visit",
        one_of=("first_visit", "every_visit"),
        about="offer each sample once in the client's life, or whenever it is trained on (to policies that decide "
        "while training)",
    )
    policy: str | Mapping[str, Any] | type[Policy] | Policy = option(
        "reservoir",
        hash=False,
        about="what is kept: a policy's kind or package.module:Name, or a table {kind, and its options}",
    )
    gradients: Mapping[str, Any] | GradientOptions = option(
        GradientOptions(),
        hash=False,
        about="how policies compute the gradients of samples, a table",
    )

    name = NAME

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.chooser, self.gradient_options  # made once, here, so that a wrong option is refused

    @cached_property
    def chooser(self) -> Policy:
        """The policy that the option `policy` names."""
        return make_policy(self.policy)

    @cached_property
    def gradient_options(self) -> GradientOptions:
        """The option `gradients` as an object."""
        return GradientOptions.of(self.gradients)

    def needs(self):
        return self.chooser.needs()

    def phases(self):
        return self.chooser.phases(self)

    def init(self, side: Client | Server) -> None:
        """x, y (and logits): (B + 1, ...) rows in storage form, the last one spare; rows 0 ... stored - 1 are valid.

        host: n (samples offered so far), seen (their ids, for policies that decide while training), ids (of the rows,
        -1 where there is none), stored, and what the policy remembers.
        """
        if isinstance(side, Server):
            return
        blank, rows = side.facts.blank, self.size + 1
        if CLASSES in self.chooser.needs() and blank.y.dim() != 1:
            raise ValueError(f"memory.policy = {self.chooser.kind!r} needs classes, which this stream has not")
        ids = torch.full((rows,), -1, dtype=torch.int64)
        host: Tree = {"n": 0, "seen": torch.zeros(0, dtype=torch.int64), "ids": ids, "stored": 0}
        side.state["host"] = {**host, **self.chooser.init(self.size)}
        side.state["x"] = blank.x.new_zeros((rows, *blank.x.shape[1:]), device=side.device)
        side.state["y"] = blank.y.new_zeros((rows, *blank.y.shape[1:]), device=side.device)
        if self.logits:
            side.state["logits"] = torch.zeros((rows, *side.facts.outputs), device=side.device)

    def buffer_tasks(self, own: Tree, task_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The task of every stored sample."""
        return task_of(stored(own).ids)

    # in training -------------------------------------------------------------------------------------------------
    def plan(self, client: Client, schedule: Schedule):
        return self.chooser.plan(self, client, schedule)

    def after(self, step: Step) -> None:
        self.chooser.after(self, step)

    def reply(self, client: Client) -> Tree:
        """Wipe the spare row, so that rejected samples are not kept; in place, in the tensors that training made."""
        for key in ("x", "y", "logits"):
            if key in client.state:
                client.state[key][self.size].zero_()
        return {}

    # in the policy's phases --------------------------------------------------------------------------------------
    def choose(self, client: Client) -> Tree:
        """Refill the buffer with what the policy chooses."""
        pool = self.pool(client)
        chosen = self.chooser.choose(pool, self.size)
        self._refill(client, pool, chosen)
        return {}

    def pool(self, client: Client) -> Pool:
        """The client's current samples and its stored ones, to choose from."""
        data, old, host = client.data, stored(client.state), client.state["host"]
        return Pool(
            client,
            torch.cat([data.x.to(old.x.device), old.x]),
            torch.cat([data.y.to(old.y.device), old.y]),
            np.concatenate([data.ids, old.ids]),
            new=len(data),
            stored=len(old),
            seen_before=int(host["n"]),
            state=host,
            gradient_options=self.gradient_options,
        )

    def _refill(self, client: Client, pool: Pool, chosen: np.ndarray) -> None:
        """The samples of the pool at `chosen` in the first rows and nothing in the others."""
        own, count, index = client.state, len(chosen), torch.from_numpy(chosen).to(pool.x.device)
        values = {"x": pool.x[index], "y": pool.y[index]}
        if self.logits:  # of new samples at the shared model, of the others as they were stored
            fresh = client.outputs(pool.x[: pool.new])
            values["logits"] = torch.cat([fresh, own["logits"][: pool.stored]])[index]
        for key, rows in values.items():
            own[key] = torch.zeros_like(own[key])
            own[key][:count] = rows
        ids = torch.full_like(own["host"]["ids"], -1)
        ids[:count] = torch.from_numpy(pool.ids[chosen])
        own["host"] = {**own["host"], "n": pool.seen_before + pool.new, "ids": ids, "stored": count}


# for parts that replay ------------------------------------------------------------------------------------------------
def stored(own: Mapping[str, Any]) -> Data:
    """The samples in the buffer. own: the memory's state."""
    count = int(own["host"]["stored"])
    return Data(own["x"][:count], own["y"][:count], own["host"]["ids"][:count].numpy())


def sample(client: Client, count: int) -> tuple[Tensor, Tensor]:
    """(x, y) of `count` different stored samples, all where there are fewer or count is 0, in random order."""
    own = client.of(NAME)
    chosen = client.rng(client.phase).permutation(int(own["host"]["stored"]))
    rows = torch.from_numpy(chosen[: count or None]).to(own["x"].device, non_blocking=True)
    x, y = take_rows([own["x"], own["y"]], rows)
    return x, y


def replay_rows(client: Client, size: int, tag: str) -> Table:
    """For every step, min(size, stored) different rows of the buffer as it is before that step."""
    rng, fill = client.rng(tag), client.plans[NAME]["fill"].values[:, 0]
    return Table.of([rng.permutation(rows)[:size] for rows in fill])


def replayed(step: Step, table: str = "rows", joined: bool = False, only_outputs: bool = False) -> dict[str, Batch]:
    """{table: the stored samples that a part planned for this step, in the table of that name}; empty while the buffer
    is. extra: the stored logits, where there are some."""
    rows = step.rows[table]
    if len(rows) == 0:
        return {}
    own = step.of(NAME).state
    x, y, *logits = take_rows([own[key] for key in ("x", "y", "logits") if key in own], rows)
    return {table: Batch(x, y, joined, {"logits": logits[0]} if logits else {}, only_outputs=only_outputs)}


# policies by name -----------------------------------------------------------------------------------------------------
def make_policy(value: str | Mapping[str, Any] | type[Policy] | Policy) -> Policy:
    """A policy from its kind, its class, or a table {kind, and its options}; a kind may be `package.module:Name`.
    Raises ValueError, which names the key."""
    if isinstance(value, Policy):
        return value
    options = dict(value) if isinstance(value, Mapping) else {"kind": value}
    kind = options.pop("kind", "")
    cls = _find(kind, "policy.kind" if isinstance(value, Mapping) else "policy")
    return with_options(cls, options, "policy", f" of {kind!r}")


def _find(kind: Any, key: str) -> type[Policy]:
    found = kind
    if isinstance(kind, str):
        found = load_object(kind, key) if ":" in kind else POLICIES.get(kind)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(
            f"{key} must be one of {', '.join(POLICIES)}, or package.module:Name of a Policy; got {kind!r}"
        )
    return found
