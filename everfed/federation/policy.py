"""What a client agrees to, whatever the server's recipe says: the file of `everfed join --policy`.

    recipes = ["0123456789abcdef..."]   # digests of the recipes that may run
    models = ["mlp", "resnet18"]        # what model.kind may be
    parts = ["fedavg", "memory", "der"] # the parts that may run, by name; protections always may
    phases = ["train", "evaluate"]      # the phases that may run, by name
    code = ["my_parts"]                 # modules that a recipe may name as package.module:Name
    require_secure_aggregation = true   # the server may learn sums only
    require_roster = true               # and only among clients of this client's --roster
    allow_collect = false               # no phase in which the server sees single clients' values
    min_noise = 1.0                     # local differential privacy with at least this noise
    budget = 8.0                        # the most epsilon of all replies, in any run, as --budget
    least_samples = 100                 # from fewer a reply is not computed
    least_batch = 16                    # from fewer no gradient or step is, but for the last step of an epoch
    least_scale = 1.0                   # the share of the samples that the server may choose to use, at least
    max_bytes = 200_000_000             # of requests and answers in a round
    max_seconds = 600                   # of work in a round

Without a policy everything is allowed except code that does not ship with everfed.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from everfed.errors import UserError
from everfed.federation.packet import FRAME_LIMIT, Packet, PacketError, digest
from everfed.federation.request import REFUSED, Answer, Request
from everfed.naming import files_inside, restricted

if TYPE_CHECKING:
    from everfed.core.context import Fewest
    from everfed.core.method import Method
    from everfed.recipe import Recipe

OWN_CODE = (
    "everfed.methods",
    "everfed.models",
    "everfed.federation.elsewhere:data",
)  # what recipes name of everfed itself
AGAIN = 1.0  # seconds after which a step that goes on after its limit is ended again
_LOG = logging.getLogger("everfed.policy")


class PolicyError(UserError):
    """A policy file that cannot be read."""


class Refusal(PacketError):
    """A request that this client's policy does not allow. The server receives the reason."""


class Policy(BaseModel):
    """None: anything is allowed. Empty lists allow nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    recipes: list[str] | None = None
    models: list[str] | None = None
    parts: list[str] | None = None
    phases: list[str] | None = None
    code: list[str] = []
    require_secure_aggregation: bool = False
    require_roster: bool = False
    allow_collect: bool = True
    min_noise: float | None = Field(None, gt=0, strict=False)
    budget: float | None = Field(None, gt=0, strict=False)
    least_samples: int = Field(0, ge=0)
    least_batch: int = Field(0, ge=0)
    least_scale: float = Field(0.0, ge=0, le=1, strict=False)
    max_bytes: int | None = Field(None, gt=0)
    max_seconds: float | None = Field(None, gt=0, strict=False)

    @staticmethod
    def read(path: Path) -> Policy:
        """Raises PolicyError with the file and the key."""
        try:
            return Policy(**tomllib.loads(path.read_text()))
        except OSError as error:
            raise PolicyError(f"--policy {path} cannot be read: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise PolicyError(f"--policy {path} is not TOML: {error}") from error
        except ValidationError as error:
            found = error.errors()[0]
            key, known = ".".join(map(str, found["loc"])), ", ".join(Policy.model_fields)
            raise PolicyError(f"--policy {path}: {key}: {found['msg']}; the keys are {known}") from error

    @property
    def message_limit(self) -> int:
        """Bytes of one request."""
        return FRAME_LIMIT if self.max_bytes is None else self.max_bytes

    def strictest_budget(self, option: float) -> float:
        """The smaller of the policy's budget and that of --budget, where 0 is no limit."""
        return min((limit for limit in (self.budget, option) if limit), default=0.0)

    def names(self, *own: str) -> tuple[str, ...]:
        """The modules and objects that a recipe may name. own: those that this client chose itself."""
        return (*OWN_CODE, *self.code, *own)

    @property
    def fewest(self) -> Fewest:
        """From how many samples anything is computed."""
        from everfed.core.context import Fewest

        return Fewest(self.least_batch, self.least_samples)

    def check_roster(self, known: bool) -> None:
        """known: is there a roster? Raises PolicyError."""
        if self.require_roster and not known:
            raise PolicyError("policy require_roster: give --roster, the other clients' keys, and --key, your own")

    def check_text(self, text: str, scale: float) -> None:
        """Raises Refusal."""
        name = digest(text.encode())
        if self.recipes is not None and name not in self.recipes:
            raise Refusal(f"policy recipes: the recipe's digest is {name}, which is not among them")
        if scale < self.least_scale:
            raise Refusal(f"policy least_scale = {self.least_scale:g}: the server asks with a scale of {scale:g}")

    def check_recipe(self, recipe: Recipe) -> None:
        """Raises Refusal."""
        privacy, dp, kind, batch = recipe.privacy, recipe.privacy.dp, recipe.model.kind, recipe.train.batch_size
        if self.models is not None and kind not in self.models:
            raise Refusal(f"policy models: the recipe has model.kind = {kind!r}, and {self.models} are allowed")
        if batch < self.least_batch:
            raise Refusal(f"policy least_batch = {self.least_batch}: the recipe has train.batch_size = {batch}")
        if self.require_roster and not privacy.secure_aggregation:
            raise Refusal("policy require_roster: the recipe has no privacy.secure_aggregation = true")
        if self.require_secure_aggregation and not privacy.secure_aggregation:
            raise Refusal("policy require_secure_aggregation: the recipe has no privacy.secure_aggregation = true")
        if self.min_noise is not None and (dp is None or dp.kind != "local" or dp.seed >= 0):
            raise Refusal("policy min_noise: the recipe must have privacy.dp of kind 'local' and without a seed")
        if self.min_noise is not None and dp is not None and dp.noise < self.min_noise:
            raise Refusal(f"policy min_noise = {self.min_noise}: the recipe has privacy.dp.noise = {dp.noise}")

    def check_method(self, method: Method) -> None:
        """Raises Refusal."""
        from everfed.core.phase import When

        own = [part.name for part in method.parts if part not in method.protections]
        unknown = [name for name in own if self.parts is not None and name not in self.parts]
        if unknown:
            raise Refusal(f"policy parts: the recipe's method has {', '.join(unknown)}, and {self.parts} are allowed")
        asked = [name for name, phase in method.phases_by_name().items() if phase.when is not When.INSIDE]
        other = [name for name in asked if self.phases is not None and name not in self.phases]
        if other:
            raise Refusal(f"policy phases: the recipe's method has {', '.join(other)}, and {self.phases} are allowed")
        if not self.allow_collect and method.reveals():
            shown = "; ".join(f"{', '.join(parts)} in phase {phase}" for phase, parts in method.reveals().items())
            raise Refusal(f"policy allow_collect = false: the server would see single clients' values of {shown}")


class Answers(Protocol):
    """A real client, or anything else that answers packets."""

    def answer(self, packet: Packet) -> Packet: ...


class Guard:
    """Answers packets within the policy: only allowed code is imported, only files of the data folder are opened, and a
    round has a limit of bytes and seconds. data: `module:function` of this client's own stream."""

    def __init__(self, client: Answers, policy: Policy, data: str | None = None, folder: Path | None = None) -> None:
        self.client, self.policy, self.folder = client, policy, folder
        self.names = policy.names(*([data] if data else []))
        self._round: tuple[str, int] = ("", -1)  # run, round
        self._bytes, self._seconds = 0, 0.0

    def answer(self, packet: Packet) -> Packet:
        self._enter(packet)
        self._bytes += _size(packet)
        started = time.monotonic()
        try:
            self._check_bytes()
            with restricted(self.names), files_inside(self.folder), self._limited():
                answer = self.client.answer(packet)
            self._bytes += _size(answer)
            self._check_bytes()
            return self._reported(answer)
        except Refusal as refusal:
            _LOG.warning("refused: %s", refusal)
            return Answer(REFUSED, reason=str(refusal)).packet()
        finally:
            self._seconds += time.monotonic() - started

    def _enter(self, packet: Packet) -> None:
        """Begin the account of a new round. A request that is none is counted in the current one."""
        try:
            request = Request.of(packet)
            here = (request.run, max(step.place[0] for step in request.steps))
        except (PacketError, ValueError):
            return
        if here != self._round:
            self._round, self._bytes, self._seconds = here, 0, 0.0

    def _check_bytes(self) -> None:
        limit = self.policy.max_bytes
        if limit is not None and self._bytes > limit:
            raise Refusal(f"policy max_bytes = {limit}: this round's requests and answers have {self._bytes}")

    def _reported(self, answer: Packet) -> Packet:
        """Refusals inside the client appear in this client's log, too."""
        if answer.header.get("kind") == REFUSED:
            _LOG.warning("refused: %s", answer.header.get("reason"))
        return answer

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Raises Refusal in the body once the seconds of this round are over; in the main thread only."""
        limit = self.policy.max_seconds
        if limit is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        armed = [limit]

        def over(number: int, frame: Any) -> None:
            if armed:
                raise Refusal(f"policy max_seconds = {limit}: this round has taken longer")

        before = signal.signal(signal.SIGALRM, over)
        try:
            if self._seconds >= limit:
                over(0, None)
            # again and again: Python drops what is raised in a destructor, logging what is raised while it writes
            signal.setitimer(signal.ITIMER_REAL, limit - self._seconds, AGAIN)
            try:
                yield
            finally:
                armed.clear()
        finally:
            armed.clear()  # an alarm may have come before the line above
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _size(packet: Packet) -> int:
    return sum(map(len, packet.pieces.values()))
