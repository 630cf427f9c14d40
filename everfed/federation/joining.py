"""`everfed join`: runs and supervises the two processes of a client: worker and SuperNode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everfed.errors import UserError
from everfed.federation.local import socket_path
from everfed.federation.logs import stamped
from everfed.federation.policy import Policy
from everfed.federation.runs import KEPT
from everfed.federation.supervisor import Child, FolderWatch, Say, StateLost, environment, python, supervise
from everfed.store.files import Locked, locked, make_private
from everfed.store.ledger import PRIVACY_LEDGER, AppendedFile

RESTART, END = "restart", "end"
KEY_REFUSED = (
    "the SuperLink refused this client's key: it is not enrolled there, or the SuperLink still waits for the heartbeat "
    "of a SuperNode that was killed, for up to a minute"
)


@dataclass(frozen=True)
class Joining:
    """server: HOST:PORT; folder: of this client's state; name: under which the server enrols it; client: the index to
    request, -1 for any; data_dir, data: where its samples come from; root, key: files of TLS and node authentication,
    None without; poll: seconds between two looks for messages; keep_runs: runs kept beside the current one; budget,
    delta: the epsilon that this client's replies may cost in all runs together, 0 for no limit; lost_state: what to do
    when its folder is removed meanwhile, RESTART or END; policy: the file of what this client agrees to; roster: that
    of the clients' public keys."""

    server: str
    folder: Path
    name: str
    client: int = -1
    data_dir: str | None = None
    data: str | None = None
    device: str = "cpu"
    root: Path | None = None
    key: Path | None = None
    poll: float = 0.5
    keep_runs: int = KEPT
    budget: float = 0.0
    delta: float = 1e-5
    lost_state: str = RESTART
    policy: Path | None = None
    roster: Path | None = None


def join(joining: Joining, say: Say) -> None:
    """Runs until it is interrupted. Raises UserError when this client runs already, and StateLost when its folder is
    removed and it is not to start again: with a budget it never does, since the account of what was spent is gone."""
    while True:
        try:
            _join_once(joining, say)
        except StateLost as lost:
            if joining.lost_state == END or joining.budget > 0:
                raise
            say(stamped(f"{lost}; starting again without it"))


def _join_once(joining: Joining, say: Say) -> None:
    make_private(joining.folder)
    try:
        with locked(joining.folder / ".join.lock"):
            say(stamped(f"{joining.name} joins {joining.server}; its state and its logs are in {joining.folder}"))
            AppendedFile(joining.folder / PRIVACY_LEDGER)  # there from the start, so that its loss is noticed
            watch = FolderWatch(joining.folder, ".join.lock", PRIVACY_LEDGER)
            try:
                supervise(children(joining), say, watch=watch.check)
            except FileNotFoundError:
                watch.check()  # the log of a child could not be opened
                raise
    except Locked as error:
        raise UserError(f"another `everfed join` runs with --folder {joining.folder}") from error


def children(joining: Joining) -> list[Child]:
    """The two processes of a client."""
    folder, env = joining.folder.absolute(), environment(joining.folder.absolute() / "flwr")
    commands = {"worker": _worker(joining, folder), "supernode": _supernode(joining, folder)}
    made = [Child(f"the {name}", command, folder / f"{name}.log", env) for name, command in commands.items()]
    worker, supernode = made
    worker.relays, supernode.explain = True, refusal
    return made


def refusal(text: str) -> str:
    """Why a SuperNode ended, from its output."""
    reason = text.partition("Failed to initialize the connection to the SuperLink.")[2].strip().splitlines()
    if not reason:
        return last_line(text)
    return KEY_REFUSED if "[code: 2004]" in reason[0] else reason[0].strip()


def last_line(text: str) -> str:
    """The last line of the output if it is an error message, else nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines and "rror" in lines[-1] else ""


def _worker(joining: Joining, folder: Path) -> list[str]:
    words = [*python(), "-m", "everfed.federation.worker", "--folder", str(folder), "--name", joining.name]
    words += ["--client", str(joining.client), "--device", joining.device, "--keep-runs", str(joining.keep_runs)]
    words += ["--budget", str(joining.budget), "--delta", str(joining.delta)]
    words += ["--server", joining.server]
    if joining.policy:
        words += ["--policy", str(joining.policy.absolute())]
    if joining.key:
        words += ["--key", str(joining.key.absolute())]
    if joining.roster:
        words += ["--roster", str(joining.roster.absolute())]
    if joining.data_dir:
        words += ["--data-dir", joining.data_dir]
    return [*words, "--data", joining.data] if joining.data else words


def _supernode(joining: Joining, folder: Path) -> list[str]:
    words = [*python(), "-m", "everfed.federation.flower.supernode", "--superlink", joining.server]
    words += ["--poll", str(joining.poll), "--worker", str(socket_path(folder))]
    words += ["--home", str(folder / "flwr")]
    if joining.policy:
        words += ["--limit", str(Policy.read(joining.policy).message_limit)]
    if joining.root is None:
        return [*words, "--insecure"]
    words += ["--root-certificates", str(joining.root)]
    return [*words, "--key", str(joining.key)] if joining.key else words
