"""model.safetensors: the trained network with what is needed to use it elsewhere: how it is built, what its inputs look
like, how they are normalised, the names of its classes, and which recipe it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from everfed import models
from everfed.core.client import new_state, personal_model
from everfed.core.context import Context, Facts, Place
from everfed.core.data import Data
from everfed.core.handle import Server
from everfed.core.layout import EXTRAS, AddsParameters, Extras, Layout
from everfed.core.message import MODEL, Model, State
from everfed.core.option import TrainOptions
from everfed.core.part import options_of, overrides
from everfed.core.phase import EVALUATE
from everfed.data import transforms
from everfed.data.source import one_sample, storage_form
from everfed.engines.eager import new_trainer
from everfed.errors import UserError
from everfed.methods import registry as methods
from everfed.models.pretrained import Rebuilds
from everfed.naming import files_inside
from everfed.session.assembly import FROZEN, IDENTITY, Run, fingerprint
from everfed.store.checkpoint import latest
from everfed.store.clients import ClientStore
from everfed.store.run import RunFolder

KEY = "everfed"  # of the file's metadata
IN_PYTHON = "python:"


# whose code a file, or a recipe that others wrote, may name without being asked
OWN_CODE = ("everfed.models", "everfed.methods", "everfed.streams", "everfed.federation.elsewhere:data")


class ModelFileError(UserError):
    """A model file that cannot be used in this way."""


@dataclass(frozen=True)
class Description:
    """What the metadata of model.safetensors holds, as JSON under the key "everfed".

    kind, options, rebuilding: of `models.build`. input_shape: of one network input. dtype: of samples before they are
    normalised: uint8 images 0..255, float32, or int64 tokens. mean, std: subtracted and divided by, per channel, after
    uint8 is scaled to [0, 1]; both empty where nothing is, mean None where the stream has its own way. score: what
    outputs are scored by; with "accuracy" they are logits of the classes. recipe: digest of what decides the run's
    numbers (`fingerprint`). adapted: the parts that changed the network, {part: its name in the registry, or
    "module:Name" of a user's own, option: value}, in order. tasks: of the run, for which such parts keep adapters or
    prompts. personal: how many parameters every client has of its own, which in the file are as at the beginning.
    """

    kind: str
    input_shape: tuple[int, ...]
    classes: int
    dtype: str = "float32"
    mean: tuple[float, ...] | None = ()
    std: tuple[float, ...] = ()
    class_names: tuple[str, ...] = ()
    score: str = "accuracy"
    options: Mapping[str, Any] = field(default_factory=dict)
    rebuilding: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = ""
    adapted: Sequence[Mapping[str, Any]] = ()
    tasks: int = 1
    personal: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, default=list)

    @staticmethod
    def from_json(text: str) -> Description:
        """Raises ModelFileError for anything that `to_json` does not write: a file may come from anywhere."""
        try:
            table = json.loads(text)
            for key in ("input_shape", "std", "class_names", "mean"):
                table[key] = None if table[key] is None else tuple(table[key])
            found = Description(**table)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ModelFileError(f"the description in the model file is damaged: {error}") from error
        for name, right in found._types().items():
            if not right:
                raise ModelFileError(
                    f"the description in the model file is damaged: {name} is {getattr(found, name)!r}"
                )
        return found

    def _types(self) -> dict[str, bool]:
        """Is each field what it is declared to be?"""

        def each(values: Any, kind: Any) -> bool:
            return isinstance(values, tuple | list) and all(isinstance(value, kind) for value in values)

        texts = {name: isinstance(getattr(self, name), str) for name in ("kind", "dtype", "score", "recipe")}
        whole = {name: type(getattr(self, name)) is int for name in ("classes", "tasks", "personal")}
        tables = {name: isinstance(getattr(self, name), dict) for name in ("options", "rebuilding")}
        return {
            **texts,
            **whole,
            **tables,
            "dtype": self.dtype in ("uint8", "float32", "int64"),
            "input_shape": each(self.input_shape, int),
            "mean": self.mean is None or each(self.mean, float),
            "std": each(self.std, float),
            "class_names": each(self.class_names, str),
            "adapted": each(self.adapted, dict) and all(isinstance(one.get("part"), str) for one in self.adapted),
        }


def describe(run: Run, module: nn.Module) -> Description:
    """Of a run's network."""
    stream, model = run.stream, run.recipe.model
    form = stream.normalisation()
    blank: Tensor = run.setup.facts.blank.x
    left_out = {"weights", FROZEN, IDENTITY}  # the file's own tensors are used instead
    return Description(
        model.kind,
        tuple(stream.input_shape),
        stream.classes,
        str(blank.dtype).removeprefix("torch."),
        None if form is None else form[0],
        () if form is None else form[1],
        tuple(map(str, stream.class_names)),
        stream.score,
        {key: value for key, value in (model.model_extra or {}).items() if key not in left_out},
        module.rebuilding() if isinstance(module, Rebuilds) else {},
        fingerprint(run),
        [
            {"part": methods.name_of(type(part)), **options_of(part)}
            for part in run.setup.method.parts
            if overrides(part, "adapt")
        ],
        run.setup.facts.tasks,
    )


def save(folder: RunFolder, run: Run, model: Model, path: Path | None = None) -> None:
    """Write model.safetensors: parameters by name, as any PyTorch user expects them, frozen ones too; personal ones as
    at the beginning. path: another file of the folder, of a snapshot."""
    module, personal = run.build_module(), run.setup.facts.personal
    whole = {**model, "params": torch.cat([model["params"].cpu(), personal])}
    description = replace(describe(run, module), personal=len(personal))
    folder.write_model(to_bytes(with_vectors(run, module, whole), description), path)


def with_vectors(run: Run, module: nn.Module, model: Model) -> nn.Module:
    """The module, holding the tensors of a whole model."""
    layout = run.setup.facts.layout
    layout.bind(module, *(model[key].cpu() for key in ("params", "stats", "counters")))
    return module


def to_bytes(module: nn.Module, description: Description) -> bytes:
    """The content of a model file."""
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in module.state_dict().items()}
    # a single key: safetensors writes several in no fixed order, and equal models should be equal files
    return safetensors.torch.save(tensors, metadata={KEY: description.to_json()})


def read_description(file: Path) -> Description | None:
    """None for a file without one, of an earlier version of everfed."""
    with safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get(KEY)
    return None if text is None else Description.from_json(text)


def load(file: Path, description: Description, model: nn.Module | None = None) -> nn.Module:
    """The network of a model file in eval mode, without the data it was trained on. model: a network of the same
    class, where the run began with an object."""
    kind: str | nn.Module = description.kind
    if description.kind.startswith(IN_PYTHON):
        if model is None:
            raise ModelFileError(
                f"{file}: the run began with a network made in Python ({description.kind.removeprefix(IN_PYTHON)}); "
                "pass one of the same class: model=..."
            )
        kind = model
    tensors = safetensors.torch.load_file(file)
    with files_inside(None):  # all that the network needs is in the file
        module = _built(file, kind, description, sum(tensor.numel() for tensor in tensors.values()))
    attach_extras(module, tensors)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelFileError(f"{file} does not fit the network {description.kind!r}: {error}") from error
    return module.eval()


def _built(file: Path, kind: str | nn.Module, description: Description, numbers: int) -> nn.Module:
    """The network as it is described. numbers: how many the file holds, as a file from anywhere may describe a network
    that no memory holds. Raises ModelFileError."""
    shape, options, rebuilding = description.input_shape, dict(description.options), description.rebuilding
    try:
        described = 0
        with suppress(Exception), torch.device("meta"):  # what cannot be built without memory is built with it below
            if isinstance(kind, str):
                blank = models.build(kind, shape, description.classes, 0, options, rebuilding=rebuilding)
                described = sum(parameter.numel() for parameter in blank.parameters())
        if described > 2 * numbers + (1 << 20):
            raise ModelFileError(f"{file} describes {described:,} parameters and holds {numbers:,}")
        return adapt(models.build(kind, shape, description.classes, 0, options, rebuilding=rebuilding), description)
    except UserError:
        raise
    except Exception as error:  # of a library that reads what the file describes
        raise ModelFileError(f"{file}: the network {description.kind!r} cannot be built: {error}") from error


def adapt(module: nn.Module, description: Description) -> nn.Module:
    """The network as the run's method changed it: adapters, prompts. Their values come from the file."""
    if not description.adapted:
        return module
    nothing = Data(torch.zeros(0), torch.zeros(0), np.zeros(0, dtype=np.int64))
    shape, layout = description.input_shape, Layout.of(module)
    facts = Facts(description.classes, shape, 1, description.tasks, 1, 1, layout, nothing, torch.zeros(0))
    parts = [
        methods.part_class(one["part"])(**{key: value for key, value in one.items() if key != "part"})
        for one in description.adapted
    ]
    for part in parts:
        if not isinstance(part, AddsParameters):
            raise ModelFileError(f"the description in the model file is damaged: part {part.name!r} changes no network")
        module = part.adapt(module, Server(part.name, {}, Context(0, facts, TrainOptions()))) or module
    return module


def attach_extras(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Register what a method's parts added to the network, by the names in the file."""
    extras = Extras()
    for name, value in tensors.items():
        if name.startswith(EXTRAS):
            scope, part, own = name.removeprefix(EXTRAS).split("/", 2)
            extras.add(part, own, nn.Parameter(torch.zeros_like(value)), scope == "personal")
    if next(extras.parameters(), None) is not None:
        module.extras = extras


def check_shared(description: Description) -> None:
    """Raises ModelFileError where the shared network alone is none that was trained."""
    if description.personal:
        raise ModelFileError(
            f"every client has {description.personal:,} parameters of its own, which the shared network lacks; name a "
            "client: everfed.load(folder, client=0), everfed export --client 0"
        )


# prediction -----------------------------------------------------------------------------------------------------------
def as_samples(description: Description, x: np.ndarray | Tensor | Sequence[Any]) -> Tensor:
    """Images, features or tokens in the form that the run's samples had, before they are normalised."""
    check_shared(description)
    if isinstance(x, Sequence):
        if len(x) == 0:
            return torch.zeros((0, *description.input_shape), dtype=getattr(torch, description.dtype))
        return torch.cat([_as_samples(description, one_sample(one, "predict")) for one in x])
    return _as_samples(description, x)


def _as_samples(description: Description, x: np.ndarray | Tensor) -> Tensor:
    samples = storage_form(x, "predict")
    if str(samples.dtype) != f"torch.{description.dtype}":
        raise ModelFileError(
            f"predict needs samples of type {description.dtype}, as in training (uint8 images hold 0 to 255); got "
            f"{samples.dtype}. Network inputs can be given to `.model` itself"
        )
    shape = description.input_shape
    if len(shape) == 3 and samples.dim() == 4 and samples.dtype == torch.uint8 and shape[1] == shape[2]:
        try:
            samples = transforms.to_format(samples, shape[0], shape[1])
        except ValueError as problem:
            raise ModelFileError(f"predict: {problem}") from problem
    if tuple(samples.shape[1:]) != shape:
        raise ModelFileError(f"predict needs samples of shape {shape}; got {tuple(samples.shape[1:])}")
    return samples


def normalised(description: Description, samples: Tensor) -> Tensor:
    """Samples as network inputs, as in training."""
    if description.mean is None:
        raise ModelFileError(
            "the stream of this run makes network inputs in a way of its own; make them yourself and call `.model`"
        )
    if samples.dtype == torch.int64:
        return samples
    return transforms.scale(samples, description.mean, description.std)


# personal models ------------------------------------------------------------------------------------------------------
def client_model(folder: RunFolder, run: Run, client: int | None) -> nn.Module:
    """The network that a client of a simulation was scored with at the end, in eval mode; None: the shared one."""
    if client is None:
        module = run.build_module()
        module.load_state_dict(safetensors.torch.load_file(folder.model))
        return module.eval()
    if not 0 <= client < run.stream.clients:
        raise ModelFileError(f"--client {client}: the run has the clients 0 to {run.stream.clients - 1}")
    store = ClientStore(folder.clients)
    state = latest(folder.checkpoint, store, fingerprint(run))
    if state is None:
        raise ModelFileError(f"{folder.path} has no checkpoint with its clients' states")
    return personal_module(run, client, store.peek(client), state.model)


def personal_module(run: Run, client: int, own: State | None, shared: Model) -> nn.Module:
    """own: the client's state, None where it never took part. Raises ModelFileError where the method's forward pass is
    no network alone."""
    setup = run.setup
    if setup.method.owner("forward") is not None:
        raise ModelFileError(
            f"method {setup.method.name!r} changes the forward pass by each client's state: its personal models are no "
            "networks alone and cannot be exported"
        )
    index = setup.stream.rounds - 1
    place, phase = Place(index, setup.stream.round(index)), setup.method.phases_by_name()[EVALUATE]
    trainer = new_trainer(setup, run.build_module)
    ctx = setup.client(client, phase, place, trainer)
    whole = personal_model(setup.method, own or new_state(setup.method, ctx), {MODEL: dict(shared)}, ctx)
    return with_vectors(run, run.build_module(), whole).eval()
