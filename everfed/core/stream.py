"""What the runner asks of a stream: who takes part in a round, what each client sees, whose task begins or ends.

The runner and the engines know only this base class; `everfed.streams` holds the scenarios. Parts see a stream through
a `StreamView`, which has no samples; the test sets are reached through `HeldOut` alone.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from everfed.core.data import Data, device_memory
from everfed.core.metric import Metrics
from everfed.errors import SettingError
from everfed.kernels import load_kernels
from everfed.metrics.scores import score_value

loss_kernel = load_kernels("everfed.kernels.loss")

_IGNORED = -100  # the target that cross-entropy leaves out
_TEST_SHARE = 0.1  # of the device memory that is free when the first test set is copied


# cross-entropy, the task loss of classification -----------------------------------------------------------------------
def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """As functional.cross_entropy: the mean over all targets but -100. On a GPU one kernel for loss and gradient."""
    if not _has_loss_kernel(outputs, y):
        return functional.cross_entropy(outputs, y)
    loss: Tensor = _CrossEntropy.apply(outputs, y)  # type: ignore[no-untyped-call]
    return loss


def _has_loss_kernel(outputs: Tensor, y: Tensor) -> bool:
    return (
        loss_kernel is not None
        and outputs.is_cuda
        and outputs.dtype == torch.float32
        and y.dtype == torch.int64
        and y.dim() == 1
        and y.is_contiguous()
        and loss_kernel.fits(outputs)
        and outputs.stride(1) == 1
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(outputs)
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, y: Tensor) -> Tensor:
        loss: Tensor
        loss, gradient = loss_kernel.cross_entropy(outputs, y)
        ctx.save_for_backward(outputs, y, gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        outputs, y, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient itself is differentiated
            (gradient,) = torch.autograd.grad(functional.cross_entropy(outputs, y), outputs, create_graph=True)
        return gradient * dloss, None


@dataclass(frozen=True)
class RoundPlan:
    """One round of a stream.

    task: the task this round is counted under in reports.
    participants: the clients that train, ascending.
    tasks: the current task of every client that has one (participants at least).
    begins, ends: the clients whose task begins or ends with this round, whether or not they take part.
    evaluate: score every task after this round (the last round of a task).
    notes: further facts for the event of this round's training (who was too late, say).

    Where clients change tasks at different rounds: server_task is the task that the server is in (None: `task`), opens
    and closes say whether a task begins or ends for the server (None: when one does for any client).
    drifting: clients that see more than one task at once; what they see is the stream's `data_in(client, round)`.

    Where replies arrive late (`Stream.stale`): began has, for every participant, the round whose model it was sent;
    starts are the clients that are sent this round's; awaited, the rounds whose models are still trained with after it.
    """

    task: int
    participants: tuple[int, ...]
    tasks: Mapping[int, int]
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    evaluate: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)
    server_task: int | None = None
    opens: bool | None = None
    closes: bool | None = None
    drifting: frozenset[int] = frozenset()
    began: Mapping[int, int] = field(default_factory=dict)
    starts: tuple[int, ...] = ()
    awaited: frozenset[int] = frozenset()

    @property
    def task_of_server(self) -> int:
        return self.task if self.server_task is None else self.server_task

    @property
    def task_opens(self) -> bool:
        """Does a task begin for the server?"""
        return bool(self.begins) if self.opens is None else self.opens

    @property
    def task_closes(self) -> bool:
        """Does a task end for the server?"""
        return bool(self.ends) if self.closes is None else self.closes


class Stream(ABC):
    """Base of all streams. Deterministic in its own seed alone, so that every method of a comparison sees the same.

    A stream says how many `clients`, `tasks`, `rounds` and `classes` there are and which `input_shape` a network gets,
    and defines `round`, `data`, `test` and `labels`. Everything else has a default.
    """

    name: str = "stream"
    clients: int
    tasks: int
    rounds: int
    rounds_per_task: int = 0  # 0: as the recipe says
    classes: int
    input_shape: tuple[int, ...]
    class_names: Sequence[str] = ()
    score: str = "accuracy"  # or another of metrics.scores: then the stream defines `measure` or `measure_all`
    also: tuple[str, ...] = ()  # further scores, from the same sums (`value`)
    warnings: tuple[str, ...] = ()  # shown when a run starts
    boundaries: bool = True  # may a method know when a task begins or ends?
    task_ids: bool = True  # may a method know which task it is in?
    asynchronous: bool = False  # do clients change tasks at different rounds?
    stale: bool = False  # may replies be of clients that were sent the model of an earlier round?
    private_data: bool = False  # are a client's samples known to that client alone, and not to a server?
    own_tests: bool = False  # has every client tests of its own? Then every model is scored on the clients
    fingerprint: str = ""  # of what was read from files beside the data
    colour_draws: int = 0  # columns at the end of `draw_augmentation` that change colours; 0 in them changes nothing
    capturable: bool = True  # do `augment` and `inputs` keep the rules of a captured step? Else steps run as they come
    visible: frozenset[str] = frozenset()  # further attributes that parts may use in training
    has_pictures: bool = False  # does it draw its samples (`pictures`)?
    checked: bool = False  # were samples checked where they were read? Else everything it gives is (`Checks`)

    # what every stream defines -----------------------------------------------------------------------------------
    @abstractmethod
    def round(self, index: int) -> RoundPlan:
        """The plan of round `index`, 0 <= index < rounds."""

    @abstractmethod
    def data(self, client: int, task: int) -> Data:
        """What `client` sees in `task`; may be empty."""

    @abstractmethod
    def test(self, task: int, split: str = "test") -> Data:
        """The held-out samples of `task`: split "test", or "validation" when one was held out of the training data."""

    @abstractmethod
    def labels(self, task: int) -> tuple[int, ...]:
        """The classes of `task`, ascending."""

    # how samples become inputs -----------------------------------------------------------------------------------
    def inputs(self, x: Tensor) -> Tensor:
        """Storage form -> network input (scaling, normalisation); batched, on x's device, no host synchronisation."""
        return x.float()

    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """(mean, std) per channel that `inputs` subtracts and divides by, both empty for none, after uint8 is scaled to
        [0, 1]; None where `inputs` does something else. A trained model's file carries it."""
        return None

    def draw_augmentation(self, rng: np.random.Generator, count: int) -> np.ndarray | None:
        """(count, k) integers that fix the augmentation of `count` samples, or None when there is none."""
        return None

    def augment(self, x: Tensor, draws: Tensor) -> Tensor:
        """Apply drawn augmentations in storage form: same shape and dtype, batched, no host synchronisation."""
        return x

    def augment_samples(self, x: Tensor, y: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The same for samples and their targets, where these change with the sample (masks of a language model)."""
        return self.augment(x, draws), y

    # loss and score ----------------------------------------------------------------------------------------------
    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The task loss of a minibatch."""
        return cross_entropy(outputs, y)

    def measure(self, outputs: Tensor, y: Tensor) -> Tensor:
        """(1 + k,) float64: how many things were scored, and the sums that `value` makes scores of; by default the sum
        of their scores (negative log-likelihoods of tokens, say). Of a stream whose score is not accuracy."""
        raise NotImplementedError(f"stream {self.name!r} is scored by {self.score}: it must define measure")

    def measure_all(self, outputs: Iterable[Tensor], y: Tensor) -> Tensor:
        """The same of a whole test set, whose outputs come in pieces; a stream with a score that is no sum over samples
        defines it."""
        total, start = torch.zeros(1, dtype=torch.float64), 0
        for piece in outputs:
            total = total + self.measure(piece, y[start : start + len(piece)].to(piece.device)).cpu()
            start += len(piece)
        return total

    def value(self, score: str, sums: Sequence[float]) -> float | None:
        """The stream's score, or a further one in `also`, from the sums of `measure_all`, added up over clients where
        these score; None where nothing was scored. By default there is a sum for each, in this order."""
        if not sums[0]:
            return None
        return score_value(score, sums[(self.score, *self.also).index(score) + 1], sums[0])

    # where clients differ ----------------------------------------------------------------------------------------
    def data_in(self, client: int, index: int) -> Data:
        """What a client that drifts sees in round `index`."""
        return self.data(client, self.round(index).tasks[client])

    def clock_of(self, client: int, index: int) -> tuple[int, int] | None:
        """(rounds of the client's task behind it, rounds that it lasts) where clients have clocks of their own."""
        return None

    def labels_of(self, client: int, task: int) -> tuple[int, ...]:
        """The classes of a client's task."""
        return self.labels(task)

    def test_of(self, client: int, task: int, split: str = "test") -> Data:
        """A client's own test samples of its task."""
        return self.test(task, split)

    def owners(self, task: int, split: str = "test") -> np.ndarray | None:
        """(n,) whose the samples of `test` are, by client, -1 for nobody's; None where the stream does not know."""
        return None

    # for reports -------------------------------------------------------------------------------------------------
    def task_of(self, client: int, ids: np.ndarray) -> np.ndarray | None:
        """(n,) the tasks that a client's samples come from, by their ids; None where the stream does not know."""
        return None

    def pictures(self, outputs: Tensor, data: Data) -> Sequence[np.ndarray]:
        """Samples as images (height, width, 3) uint8, with what a model says of them."""
        return ()

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts for result.json."""
        return {"name": self.name}

    def identity(self) -> str:
        """A digest of the data and of how it is divided; seeds are no part of it: those of one experiment share it."""
        shape = [self.name, self.clients, self.tasks, self.rounds, self.classes, self.input_shape]
        tests = (tensor for task in range(self.tasks) for tensor in (self.test(task).x, self.test(task).y))
        return digest_of(json.dumps(shape), *tests)


def digest_of(text: str, *tensors: Tensor) -> str:
    """16 hexadecimal digits of a text and the content of tensors."""
    found = hashlib.blake2b(text.encode(), digest_size=8)
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.numel():
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


class Checks:
    """Looks once at all that a stream of a user's own gives: numbers must be finite, labels those of its classes,
    and a sample id names one sample of a client, since replay knows samples by them. Messages count tasks from 1."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._seen: set[tuple[str, int | None, int]] = set()
        self._known: dict[int, dict[str, tuple[str, np.ndarray, Callable[[], Data]]]] = {}  # by client

    def training(self, client: int, task: int, data: Data) -> Data:
        """What a client sees in a task."""
        if self._is_new("train", client, task):
            place = f"task {task + 1}"
            self._check_client(client, place, place, data, lambda: self.stream.data(client, task))
        return data

    def drifting(self, client: int, index: int, data: Data) -> Data:
        """What a client that drifts sees in a round; its ids are compared with those of the round before."""
        if self._is_new("round", client, index):
            self._check_client(client, f"round {index + 1}", "round", data, lambda: self.stream.data_in(client, index))
        return data

    def held_out(self, client: int | None, task: int, split: str, data: Data) -> Data:
        """What a task is scored on."""
        if self._is_new(split, client, task):
            self._check(data, f"{split} samples of {'' if client is None else f'client {client}, '}task {task + 1}")
        return data

    def _is_new(self, kind: str, client: int | None, place: int) -> bool:
        if self.stream.checked or (kind, client, place) in self._seen:
            return False
        self._seen.add((kind, client, place))
        return True

    def _check(self, data: Data, where: str) -> None:
        for name, values in (("x", data.x), ("y", data.y)):
            if values.dtype.is_floating_point and not bool(values.isfinite().all()):
                place = (~values.isfinite()).nonzero()[0].tolist()
                raise SettingError(
                    f"stream: {self.stream.name!r}, {where}: {name}{place} is {values[tuple(place)].item():g}, no "
                    "finite number; fill it in, or leave the sample out"
                )
        if self.stream.score == "accuracy" and not data.y.dtype.is_floating_point:
            wrong = ((data.y < 0) & (data.y != _IGNORED)) | (data.y >= self.stream.classes)
            if bool(wrong.any()):
                place = wrong.nonzero()[0].tolist()
                raise SettingError(
                    f"stream: {self.stream.name!r}, {where}: the label y{place} is {data.y[tuple(place)].item()}; with "
                    f"{self.stream.classes} classes labels are 0 to {self.stream.classes - 1}"
                )

    def _check_client(self, client: int, place: str, keep_as: str, data: Data, again: Callable[[], Data]) -> None:
        where = f"client {client}, {place}"
        self._check(data, where)
        earlier = self._known.setdefault(client, {})
        for other, ids, before in earlier.values():
            common, here, there = np.intersect1d(data.ids, ids, return_indices=True)
            differs = data.x[here] != before().x[there] if len(common) else torch.zeros(0)
            if bool(differs.any()):
                which = common[int(differs.nonzero()[0, 0])]
                raise SettingError(
                    f"stream: {self.stream.name!r}, {where}: sample id {which} is another sample of {other}, and "
                    "replay would take them for the same. Give every sample of a client an id of its own, such as "
                    f"ids + {place.split()[0]} * 1_000_000"
                )
        earlier[keep_as] = place, data.ids, again


class Hidden(RuntimeError):
    """A part asked for what this stream hides."""


_VISIBLE = frozenset(
    {
        "name", "clients", "tasks", "rounds", "classes", "input_shape", "score", "boundaries", "task_ids",
        "labels", "labels_of", "class_names", "inputs", "draw_augmentation", "augment", "augment_samples",
        "asynchronous", "colour_draws", "capturable", "loss", "measure", "measure_all", "also",
    }
)  # fmt: skip
_OF_TASKS = frozenset({"tasks", "labels", "labels_of"})  # hidden with the tasks


class StreamView:
    """What local training may know of a stream: inputs, classes, augmentation and loss, never a sample.

    A client holds what it sees now, and nothing else. The view keeps honest code honest, as a real client's disk would;
    it is no sandbox for code that digs. A stream names further attributes in `visible`.
    """

    def __init__(self, stream: Stream) -> None:
        hidden = frozenset() if stream.boundaries or stream.task_ids else _OF_TASKS
        self._visible = {name: getattr(stream, name) for name in (_VISIBLE | stream.visible) - hidden}
        self._known = frozenset(name for name in dir(stream) if not name.startswith("_"))
        self._round = stream.round

    def __getattr__(self, name: str) -> Any:
        visible: dict[str, Any] = self.__dict__.get("_visible", {})
        if name in visible:
            return visible[name]
        if name in self.__dict__.get("_known", ()):
            raise Hidden(
                f"a part may not use {name!r} of the stream: what a client sees now comes to its hooks as `data`; one "
                "that needs HISTORY has client.history() for its earlier tasks, one that needs HELD_OUT client.held_out"
            )
        raise AttributeError(f"this stream has no {name!r}")

    def takes_part(self, client: int | None, index: int) -> bool:
        """Is the client among those that train in round `index`?"""
        return client in self._round(index).participants


class HeldOut:
    """The test sets of a stream, for scoring. On a GPU the copies are kept, so that each crosses once.

    budget: bytes of copies kept on the device; by default a share of its free memory. First come, first kept: tasks are
    scored in the same order every time, where dropping the oldest would never find one again. metrics: what is measured
    on them beside the score.
    """

    def __init__(self, stream: Stream, budget: int | None = None, metrics: Metrics | None = None) -> None:
        self.stream, self.metrics = stream, metrics or Metrics()
        self.budget = budget
        self._checks = Checks(stream)
        self.bytes = 0
        self._cached: dict[Hashable, Data] = {}
        self._lock = Lock()

    def labels(self, client: int | None, task: int) -> tuple[int, ...]:
        """The classes of a task: the client's own, where clients have tests of their own."""
        if client is None or not self.stream.own_tests:
            return self.stream.labels(task)
        return self.stream.labels_of(client, task)

    def get(self, client: int | None, task: int, split: str, device: torch.device) -> Data:
        """The samples of a task, on the device if its budget allows, else where the stream has them."""
        whose = client if self.stream.own_tests else None
        if device.type == "cpu":
            return self._load(whose, task, split)
        key = (whose, task, split, device)
        with self._lock:  # several slots of a GPU may score at once
            return self._cached[key] if key in self._cached else self._copy(key, self._load(whose, task, split), device)

    def owners(self, client: int | None, task: int, split: str) -> np.ndarray | None:
        """(n,) whose the samples of `get` are, where the stream knows: the client's own, or by sample."""
        if client is not None:
            return np.full(len(self.get(client, task, split, torch.device("cpu"))), client)
        return self.stream.owners(task, split)

    def _load(self, client: int | None, task: int, split: str) -> Data:
        data = self.stream.test(task, split) if client is None else self.stream.test_of(client, task, split)
        return self._checks.held_out(client, task, split, data)

    def _copy(self, key: Hashable, data: Data, device: torch.device) -> Data:
        if self.budget is None:
            self.budget = int(device_memory(device)[0] * _TEST_SHARE) if device.type == "cuda" else 0
        size = data.x.nbytes + data.y.nbytes
        if self.bytes + size > self.budget:
            return data
        copy = data.to(device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # whichever stream reads it next finds it there
        self.bytes += size
        self._cached[key] = copy
        return copy
