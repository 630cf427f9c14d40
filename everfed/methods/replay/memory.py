"""Memory: the one replay buffer of a client, shared by every part that replays; and the interface of the policies that
decide what it holds, the reservoir over the client's whole life by default, or another of `POLICIES`.

A policy is a frozen dataclass of options. It decides in the training steps (`plan`, `after`: reservoir, GSS-greedy) or
in phases of the memory. By default that is one phase at the end of a task, which offers the task's samples and the
stored ones together; such a policy defines `choose` and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import take_rows
from everfed.core.option import HasOptions
from everfed.method import (
    CLASSES,
    END,
    MODEL,
    Batch,
    Client,
    Cohort,
    CompositionError,
    Data,
    Model,
    Part,
    Phase,
    Schedule,
    Server,
    Step,
    Table,
    Tables,
    Tree,
    option,
)
from everfed.methods.replay.sample_gradients import GradientOptions, gradients_at
from everfed.naming import load_object, with_options

# where every policy lies: kind -> module:Class in everfed.methods.replay
POLICIES: Mapping[str, str] = {
    "reservoir": "reservoir:Reservoir",
    "naive-uniform": "random_selection:NaiveUniform",
    "approximate-uniform": "random_selection:ApproximateUniform",
    "fixed-proportion": "random_selection:FixedProportion",
    "herding": "herding:Herding",
    "on-transition": "transition:OnTransition",
    "gss-greedy": "gss:GSSGreedy",
    "gss-cluster": "gss:GSSCluster",
    "uncoordinated": "coordinated:Uncoordinated",
    "coordinated": "coordinated:Coordinated",
    "re-fed": "refed:ReFed",
    "fedcbdr": "fedcbdr:Leverage",
}
NAME = "memory"  # of the part: the namespace of its state and messages
REMEMBER = "remember"  # the phase in which clients choose


@dataclass(frozen=True)
class Pool:
    """The samples that a client chooses from: its current samples X_t first, then its stored ones R_t.

    x, y: (new + stored, ...) in storage form. ids: (new + stored,). seen_before: samples seen in all earlier tasks,
    stored or not. state: what the policy remembers, a dict to read and write. gradient_options: how gradients are made.
    """

    client: Client
    x: Tensor
    y: Tensor
    ids: np.ndarray
    new: int
    stored: int
    seen_before: int
    state: Tree
    gradient_options: GradientOptions

    def __len__(self) -> int:
        return self.new + self.stored

    @property
    def model(self) -> Model:
        """The shared model, for policies that need one."""
        if MODEL not in self.client.messages:
            raise ValueError("this policy uses the model, so it must set needs_model = True")
        return self.client.model

    @property
    def message(self) -> Mapping[str, Any]:
        """What the policy's server side sent."""
        return self.client.message

    def rng(self, tag: str) -> np.random.Generator:
        """A generator of this choice's own, for `tag`."""
        return self.client.rng(tag)

    def gradients(self) -> Tensor:
        """(new + stored, d) gradients of the single-sample losses at the model."""
        return gradients_at(self.client.context, self.model, self.x, self.y, self.gradient_options)


@dataclass(frozen=True)
class Policy(HasOptions):
    """Base of all policies. `kind` is its name in recipes; one of a user's own goes by package.module:Name."""

    kind = ""
    about = ""
    needs_model = True  # does `choose` use the model?

    def needs(self) -> AbstractSet[str]:
        """What it must know or have, in the words of a part's `needs` (CLASSES, TOGETHER, EAGER)."""
        return frozenset()

    def init(self, size: int) -> Tree:
        """What it remembers beside a buffer of so many rows, in host memory."""
        return {}

    # in phases of its own ----------------------------------------------------------------------------------------
    def phases(self, memory: Memory) -> tuple[Phase, ...]:
        """One phase at the end of every task but the last, after which nothing is replayed."""
        sends = self.needs_model or memory.logits
        return (Phase(REMEMBER, Cohort.BOUNDARY, END, in_last_round=False, sends=sends, run=memory.choose),)

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        """Different positions of the pool, at most `size`, in the order of the buffer."""
        raise CompositionError(f"policy {self.kind or type(self).__name__!r} has a phase to choose in, but no choose()")

    # in training -------------------------------------------------------------------------------------------------
    def plan(self, memory: Memory, client: Client, schedule: Schedule) -> Tables:
        """Tables for every step; "fill" holds the number of valid rows before it. May change `client.state["host"]`."""
        return {"fill": Table.of([np.array([int(client.state["host"]["stored"])])] * schedule.steps)}

    def after(self, memory: Memory, step: Step) -> None:
        """After a training step; nothing to do for a policy that chooses in a phase."""


# the part -------------------------------------------------------------------------------------------------------------
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
        _check_choice(self.chooser.kind or type(self.chooser).__name__, chosen, len(pool), self.size)
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


def _check_choice(policy: str, chosen: object, pool: int, size: int) -> None:
    """Refuses what is no choice of at most `size` different positions of the pool."""
    right = isinstance(chosen, np.ndarray) and chosen.ndim == 1 and (len(chosen) == 0 or chosen.dtype.kind in "iu")
    if not right:
        raise TypeError(f"policy {policy!r}: choose() must return a numpy array of positions, not {chosen!r:.80}")
    assert isinstance(chosen, np.ndarray)
    if len(chosen) > size or len(np.unique(chosen)) < len(chosen) or not ((chosen >= 0) & (chosen < pool)).all():
        raise ValueError(
            f"policy {policy!r}: choose() must return at most {size} different positions from 0 to {pool - 1}, "
            f"not {len(chosen)}: {chosen!s:.80}"
        )


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
    cls = policy_class(kind, "policy.kind" if isinstance(value, Mapping) else "policy")
    return with_options(cls, options, "policy", f" of {kind!r}")


def policy_class(kind: Any, key: str = "policy") -> type[Policy]:
    """The policy of that kind, or `package.module:Name`. Raises ValueError, which names the key."""
    found = kind
    if isinstance(kind, str):
        where = f"everfed.methods.replay.{POLICIES[kind]}" if kind in POLICIES else kind
        found = load_object(where, key) if ":" in where else None
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(
            f"{key} must be one of {', '.join(POLICIES)}, or package.module:Name of a Policy; got {kind!r}"
        )
    return found
