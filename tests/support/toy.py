"""A tiny stream and a bench that runs any method on it, so that a test states only what it is about.

`Bench("fedgp+der").run()` gives an outcome: `.params` is the shared model at the end, `.clients[0]["memory"]` the state
of a client, `.events` what was reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everfed import models
from everfed.core.client import new_state
from everfed.core.context import Context, Facts, Place, Setup, TrainOptions
from everfed.core.data import Data
from everfed.core.engine import Engine
from everfed.core.evaluate import EvalOptions
from everfed.core.events import Event
from everfed.core.handle import Client, Server
from everfed.core.layout import Layout, attach
from everfed.core.message import MODEL, Model, State
from everfed.core.method import Method
from everfed.core.optimizer import Optimizer
from everfed.core.phase import Phase
from everfed.core.server import Runner, RunState
from everfed.core.stream import RoundPlan, Stream
from everfed.core.trainer import Trainer
from everfed.engines.eager import Eager
from everfed.methods import registry as methods
from everfed.methods.pretrained.piecewise import Piecewise
from everfed.methods.pretrained.prompts import PromptL2P
from everfed.models.fused import batch_norm_act
from everfed.models.vit import ViT
from everfed.store.clients import ClientStore

Options = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Toy(Stream):
    """Noisy class prototypes as 4 x 4 images, shifted by one pixel per task (domain-incremental).

    sizes: samples of single (client, task) pairs, where they are not `samples`. cohorts: who takes part in a round,
    where it is not everybody. only: the classes a client sees. augmented: adds a drawn integer to every image.
    """

    clients: int = 3
    tasks: int = 2
    rounds_per_task: int = 2
    samples: int = 12
    classes: int = 4
    sizes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    cohorts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    only: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    augmented: bool = False
    boundaries: bool = True
    task_ids: bool = True
    name: str = "toy"
    score: str = "accuracy"

    @property
    def rounds(self) -> int:
        return self.tasks * self.rounds_per_task

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (1, 4, 4)

    def round(self, index: int) -> RoundPlan:
        task, inside = divmod(index, self.rounds_per_task)
        everybody, last = tuple(range(self.clients)), inside == self.rounds_per_task - 1
        return RoundPlan(
            task,
            self.cohorts.get(index, everybody),
            {client: task for client in everybody},
            begins=everybody if inside == 0 else (),
            ends=everybody if last else (),
            evaluate=last,
        )

    def data(self, client: int, task: int) -> Data:
        count = self.sizes.get((client, task), self.samples)
        return self._draw(np.random.default_rng([client, task]), count, task, self.only.get(client))

    def test(self, task: int, split: str = "test") -> Data:
        return self._draw(np.random.default_rng([1000, task, split == "test"]), 40, task, None)

    def labels(self, task: int) -> tuple[int, ...]:
        return tuple(range(self.classes))

    def inputs(self, x: Tensor) -> Tensor:
        return x.float() / 255.0

    def draw_augmentation(self, rng: np.random.Generator, count: int) -> np.ndarray | None:
        return rng.integers(0, 30, (count, 1)) if self.augmented else None

    def augment(self, x: Tensor, draws: Tensor) -> Tensor:
        return x + draws.to(x.dtype).reshape(-1, 1, 1, 1)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def _draw(self, rng: np.random.Generator, count: int, task: int, only: tuple[int, ...] | None) -> Data:
        labels = rng.choice(only or range(self.classes), count) if count else np.zeros(0, dtype=np.int64)
        prototypes = np.random.default_rng(7).integers(0, 150, (self.classes, 4, 4))
        images = np.roll(prototypes[labels], task, axis=2) + rng.integers(0, 70, (count, 4, 4))
        return Data(
            torch.from_numpy(images.astype(np.uint8)).unsqueeze(1),
            torch.from_numpy(labels.astype(np.int64)),
            np.arange(count, dtype=np.int64) + 10_000 * task,
        )


@dataclass(frozen=True)
class Given(Toy):
    """A stream of float arrays named in the test, {(client, task): (x, y)}, with a loss of the test's own.

    It is scored only where its targets are classes.
    """

    table: Mapping[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    objective: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(next(iter(self.table.values()))[0].shape[1:])

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.objective(outputs, y)

    def round(self, index: int) -> RoundPlan:
        plan = super().round(index)
        return replace(plan, evaluate=plan.evaluate and self.test(0).y.dtype == torch.int64)

    def data(self, client: int, task: int) -> Data:
        x, y = self.table[client, task]
        return Data(x, y, np.arange(len(x), dtype=np.int64) + 10_000 * task)

    def test(self, task: int, split: str = "test") -> Data:
        return self.data(0, task)

    def inputs(self, x: Tensor) -> Tensor:
        return x


class Norm(nn.Module):
    """A network with BatchNorm over 4 x 4 maps and a dropout layer of torch's own."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))  # type: ignore[no-any-return]


class Normed(nn.Module):
    """A convolution and BatchNorm by `batch_norm_act`, with channels enough for its kernels."""

    normalises_apart = True

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(batch_norm_act(self.conv(x), self.norm).flatten(1))  # type: ignore[no-any-return]


class Linear(nn.Module):
    """One linear map without a bias, its weights zero at first: the simplest thing with a closed form."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.map = nn.Linear(int(np.prod(input_shape)), classes, bias=False)
        nn.init.zeros_(self.map.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x.flatten(1))  # type: ignore[no-any-return]


def tiny_vit(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A Vision Transformer of two blocks, for methods that adapt one."""
    return ViT(input_shape, classes, patch=2, width=8, depth=2, heads=2)


def mean_square(outputs: Tensor, y: Tensor) -> Tensor:
    """Half the mean squared error of a single output."""
    return 0.5 * (outputs.squeeze(1) - y).square().mean()


SMALL_SYNTHESIS = {
    "synth_batch": 8, "g_steps": 2, "nz": 6, "kd_steps": 2, "kd_batch": 4, "batch": 4, "n_syn": 20,
}  # fmt: skip
# options of parts whose defaults are made for real data, {part: {option: value}}
SMALL: dict[str, dict[str, Any]] = {
    "af-fcl": {"hidden": 6},
    "fedl2p": {"epochs": 2, "outer_epochs": 1, "terms": 2, "hidden": 5},
    "fedcil": {"server_steps": 3, "server_chunk": 2, "server_batch": 4, "noise": 3, "width": 4},
    "ccvr": {"per_class": 20, "epochs": 2},
    "hgp": {"per_class": 20, "epochs": 2},
    "ranpac": {"width": 16},
    "fedran": {"width": 16, "rank": 6},
    "mfcl": {"gen_steps": 5, "gen_chunk": 2, "gen_batch": 8, "syn_batch": 4, "z_dim": 6, "gen_light": True},
    "target": {"syn_round": 3, "warmup": 1, **SMALL_SYNTHESIS},
    "fed-cprompt": {"components": 2, "length": 2, "blocks": (0, 1), "near": 1.0, "far": 0.1},
    "prompt-coda": {"components": 2, "length": 2, "blocks": (0, 1)},
    "prompt-dual": {"length": 2, "general": (0,), "expert": (1,)},
    "prompt-shared": {"length": 2, "blocks": (0, 1)},
    "prompt-l2p": {"pool": 4, "length": 2, "top": 2},
    "lander": {"syn_round": 3, "warmup": 1, "width": 5, "group": 3, **SMALL_SYNTHESIS},
}


def small_memory(name: str, size: int = 8) -> dict[str, dict[str, Any]]:
    """Options of preset `name` that suit a toy: a buffer (where it has one) that fills up within a task, and SMALL."""
    small = {**SMALL, "memory": {"size": size}}
    return {part.name: small[part.name] for part in methods.build(name).parts if part.name in small}


@dataclass
class Outcome:
    """A run at its end (or where it was stopped), with what its clients remember and what was reported."""

    state: RunState
    store: ClientStore
    events: list[Event]

    @property
    def params(self) -> Tensor:
        return self.state.model["params"]

    @property
    def clients(self) -> dict[int, State]:
        return {client: self.store.get(client) or {} for client in self.store.clients()}

    def copy(self) -> Outcome:
        """Nothing that happens later changes it."""
        store = ClientStore()
        for client, state in self.clients.items():
            store.put(client, deepcopy(state))
        return Outcome(deepcopy(self.state), store, list(self.events))


@dataclass(frozen=True)
class Bench:
    """Stream, method, network and options of a toy run. Everything it hands out is freshly built.

    method: a preset's name, or a function that composes a method. options: of the preset's parts; by default a buffer
    of 8 samples. module: (input_shape, classes) -> network; by default an MLP with one hidden layer of 8, and for
    methods of pretrained networks, in place of `Norm` too, a Vision Transformer.
    """

    method: str | Callable[[], Method] = "fedavg"
    options: Options | None = None
    stream: Toy = field(default_factory=Toy)
    train: TrainOptions = field(default_factory=lambda: TrainOptions(2, 5, Optimizer(lr=0.1)))
    module: Callable[[tuple[int, ...], int], nn.Module] | None = None
    seed: int = 0
    evaluation: EvalOptions = field(default_factory=EvalOptions)

    def change(self, **fields: Any) -> Bench:
        """A copy with some fields changed."""
        return replace(self, **fields)

    def build_method(self) -> Method:
        if not isinstance(self.method, str):
            return self.method()
        options = small_memory(self.method) if self.options is None else self.options
        return methods.build(self.method, options)

    def build_module(self) -> nn.Module:
        """The network with its first weights and the method's extra parameters."""
        return self._network(self.build_method())

    def bare_module(self) -> nn.Module:
        return self._bare(self.build_method())

    def _network(self, method: Method) -> nn.Module:
        bare = self._bare(method)
        context = Context(self.seed, self._facts(Layout.of(bare)), self.train)
        return attach(bare, method.parts, lambda part: Server(part, {}, context))

    def _bare(self, method: Method) -> nn.Module:
        shape, classes, module = self.stream.input_shape, self.stream.classes, self.module
        if module in (None, Norm) and any(isinstance(part, Piecewise | PromptL2P) for part in method.parts):
            module = tiny_vit
        if module is None:
            return models.build("mlp", shape, classes, self.seed, {"hidden": [8]})
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            return module(shape, classes)

    def layout(self) -> Layout:
        return self._start()[1]

    def model(self) -> Model:
        """The shared model before the first round."""
        _, layout, vectors = self._start()
        return {**vectors, "params": vectors["params"][: layout.shared]}

    def setup(self) -> Setup:
        method, layout, vectors = self._start()
        facts = self._facts(layout, vectors["params"][layout.shared :])
        return Setup(method, self.stream, facts, self.train, self.seed)

    def _start(self) -> tuple[Method, Layout, Model]:
        """A method with the layout and the first weights of its network, those that stay on clients included."""
        method = self.build_method()
        module = self._network(method)
        layout = Layout.of(module, method.is_personal)
        return method, layout, layout.read(module)

    def _facts(self, layout: Layout, personal: Tensor | None = None) -> Facts:
        stream = self.stream
        return Facts(
            classes=stream.classes,
            input_shape=stream.input_shape,
            clients=stream.clients,
            tasks=stream.tasks,
            rounds=stream.rounds,
            rounds_per_task=stream.rounds_per_task,
            layout=layout,
            blank=stream.test(0).take(np.zeros(0, dtype=np.int64)),
            personal=torch.zeros(0) if personal is None else personal,
            boundaries=stream.boundaries,
            task_ids=stream.task_ids,
        )

    def trainer(self, setup: Setup | None = None) -> Trainer:
        return Eager(setup or self.setup(), ClientStore(), self.build_module).trainer

    def context(self, client: int = 0, round_index: int = 0, phase: str = "train") -> Context:
        """What a hook on `client` is given in a round."""
        place, setup = Place(round_index, self.stream.round(round_index)), self.setup()
        return setup.client(client, Phase(phase), place, self.trainer(setup))

    def client(self, part: str, states: State | None = None, number: int = 0, **more: Any) -> Client:
        """The handle of a hook of `part` on a client. more: round_index, phase; messages, model, data, fitted, ... of
        `Client`; by default the first model, as received, and the client's samples of the round."""
        index, phase = more.pop("round_index", 0), more.pop("phase", "train")
        context = self.context(number, index, phase)
        model = more.pop("model", None) or self.model()
        messages = {MODEL: model, **more.pop("messages", {})}
        data = more.pop("data", None)
        if data is None:
            data = self.stream.data(number, self.stream.round(index).tasks[number])
        return Client(
            part, self.new_client(number) if states is None else states, context, messages, model, data, **more
        )

    def server(self, part: str, states: State | None = None, **more: Any) -> Server:
        """The handle of a hook of `part` on the server. more: round_index, phase, repeat; reduced, before, model."""
        index, phase = more.pop("round_index", 0), more.pop("phase", "train")
        place = Place(index, self.stream.round(index), more.pop("repeat", 0))
        context = self.setup().server(phase, place, self.trainer() if phase != "train" else None)
        return Server(part, {MODEL: self.model(), **(states or {})}, context, **more)

    def new_client(self, client: int = 0) -> State:
        """The state of a client that was never called."""
        return new_state(self.build_method(), self.context(client))

    def eager(self, setup: Setup, store: ClientStore) -> Engine:
        return Eager(setup, store, self.build_module)

    def run(
        self,
        engine: Callable[[Setup, ClientStore], Engine] | None = None,
        *,
        state: RunState | None = None,
        store: ClientStore | None = None,
        rounds: int | None = None,
    ) -> Outcome:
        """Run to the end of the stream, or until `rounds` rounds are over; from `state` and `store` when given."""
        setup, store = self.setup(), ClientStore() if store is None else store
        events: list[Event] = []
        runner = Runner(
            setup,
            (engine or self.eager)(setup, store),
            self.model(),
            self.evaluation,
            notify=events.append,
            save=lambda reached, task_end: _pause_after(rounds, reached),
            state=state,
        )
        with suppress(Paused):
            runner.run()
        return Outcome(runner.state, store, events)

    def after(self, *rounds: int) -> list[Outcome]:
        """The run after each of these numbers of rounds, which rise. One run: it goes on after every stop; what is
        handed out are copies. Events are those since the stop before."""
        found: list[Outcome] = []
        state, store = None, ClientStore()
        for count in rounds:
            reached = self.run(state=state, store=store, rounds=count)
            state = reached.state
            found.append(reached.copy())
        return found


class Paused(Exception):
    """A run was stopped where the test wanted it to stop."""


def _pause_after(rounds: int | None, reached: RunState) -> None:
    if rounds is not None and reached.round >= rounds:
        raise Paused


def comparable(state: RunState) -> dict[str, Any]:
    """The run's state as a tree, without the time it took."""
    return replace(state, seconds=0.0).to_tree()
