"""The server of a federated run: its folder, its identity, its clients, and the runner."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everfed.errors import RecipeError
from everfed.federation.phase_options import PhaseOptions
from everfed.recipe import Recipe, read, scaled, to_toml
from everfed.store.files import make_private, write_atomic
from everfed.store.run import RunError, RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from everfed.core.context import PlaceKey
    from everfed.core.engine import Engine
    from everfed.core.events import Observer
    from everfed.core.stream import Stream
    from everfed.federation.transport import Connection, Node
    from everfed.session import Run

IDENTITY = "federation.json"
SENT = "sent.toml"  # the recipe as clients receive it, whose digest their policies may name


@dataclass(frozen=True)
class Serving:
    """A run to serve. clients: how many must be connected before it starts (0: all of the recipe's). keys: the clients'
    public keys by name, where nodes are authenticated."""

    recipe: Recipe
    folder: Path
    data_dir: str | None = None
    scale: float = 1.0
    clients: int = 0
    keys: dict[str, bytes] = field(default_factory=dict)
    checkpoint_every: float = 5.0


def serve(serving: Serving, open_grid: Callable[[], Connection], observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Start the run, or resume it from its folder; returns the content of result.json."""
    with _run_folder(serving) as folder:
        finished = folder.read_result()
        if finished is not None:
            return finished
        from everfed.session import assemble, execute

        recipe = scaled(_with_memory_format(serving.recipe, folder), serving.scale)
        run = assemble(recipe, serving.data_dir, serving.scale)
        refuse_arrivals(run.stream)

        def build(run: Run, notify: Observer, durable: Callable[[], PlaceKey]) -> Engine:
            return _engine(serving, folder, run, open_grid, notify, durable)

        # a sum that was opened can only be opened again with the same clients, so none is left to be repeated
        every = 0.0 if recipe.privacy.secure_aggregation else serving.checkpoint_every
        return execute(run, folder, observers, every, build)


def refuse_arrivals(stream: Stream) -> None:
    """Raises RecipeError for a stream on which replies arrive in later rounds: real clients are collected by phase."""
    if stream.stale:
        raise RecipeError(
            "stream.arrivals is a simulation's: the server of real clients collects a phase's replies before it goes "
            "on. Leave it out, and let federation.deadline end a phase without the slowest"
        )


def _run_folder(serving: Serving) -> AbstractContextManager[RunFolder]:
    """The locked run folder: a new one, or that of an unfinished federation of the same recipe."""
    settings = {"data_dir": serving.data_dir, "scale": serving.scale, "federated": True}
    folder = RunFolder(serving.folder)
    if not folder.recipe.exists():
        return RunFolder.new(serving.folder, to_toml(serving.recipe), settings)
    if read(folder.recipe) != serving.recipe or not settings.items() <= folder.read_settings().items():
        raise RunError(f"{serving.folder} belongs to another recipe, or is no federation; choose another --out")
    make_private(serving.folder)
    return _locked(folder)


@contextmanager
def _locked(folder: RunFolder) -> Iterator[RunFolder]:
    with folder.held():
        yield folder


def _with_memory_format(recipe: Recipe, folder: RunFolder) -> Recipe:
    """With the memory format that the run began with, so that vectors have one layout on the server and all clients."""
    order = folder.read_settings().get("memory_format")
    section = recipe.engine.model_copy(update={"memory_format": order} if order else {})
    return recipe.model_copy(update={"engine": section})


def _with_frozen(recipe: Recipe, digest: str) -> Recipe:
    """With the digest of the frozen weights, which no message contains: a client with others refuses."""
    section = recipe.model.model_copy(update={"frozen_sha256": digest} if digest else {})
    return recipe.model_copy(update={"model": section})


def _engine(
    serving: Serving,
    folder: RunFolder,
    run: Run,
    open_grid: Callable[[], Connection],
    notify: Observer,
    durable: Callable[[], PlaceKey],
) -> Engine:
    from everfed.federation.audit import AUDIT, AuditedTransport, AuditLog, noted
    from everfed.federation.engine import Federated, RunIdentity
    from everfed.federation.roster import ROSTER, Roster
    from everfed.federation.transport import GridTransport

    roster = Roster(folder.path / ROSTER, run.stream.clients, serving.keys)

    def enrol(node: Node) -> int:
        return roster.enrol(node.name, node.client, node.key if serving.keys else b"")

    name, epoch = next_epoch(folder.path)
    sent = _with_frozen(_with_memory_format(serving.recipe, folder), run.frozen)
    identity = RunIdentity(name, epoch, to_toml(sent), serving.scale)
    write_atomic(folder.path / SENT, identity.recipe.encode())
    log = AuditLog(folder.path / AUDIT)
    log.write(what="start", run=name, epoch=epoch)
    transport = AuditedTransport(GridTransport(open_grid, enrol, noted(notify, log)), log)
    section = run.recipe.federation
    options = section.as_options(PhaseOptions)
    _wait_for(transport, serving.clients or run.stream.clients, notify)

    def allowed(client: int) -> int | None:
        return section.samples.get(roster.name(client))

    return Federated(
        run.setup,
        run.build_module,
        transport,
        identity,
        options,
        durable,
        notify,
        outlier=section.outlier,
        allowed=allowed,
    )


def next_epoch(folder: Path) -> tuple[str, int]:
    """(the run's identity, how often its server was started); written to disk before anything is sent."""
    path = folder / IDENTITY
    known: dict[str, Any] = {"run": secrets.token_hex(16), "epoch": 0}
    if path.exists():
        known = json.loads(path.read_text())
    known["epoch"] += 1
    write_atomic(path, json.dumps(known).encode())
    return known["run"], known["epoch"]


def _wait_for(transport: Any, clients: int, notify: Observer) -> None:
    """Wait until so many clients are connected."""
    reported = -1
    while len(transport.connected()) < clients:
        if len(transport.connected()) != reported:
            reported = len(transport.connected())
            notify({"event": "waiting", "connected": reported, "clients": clients})
        transport.receive()
        time.sleep(0.1)
