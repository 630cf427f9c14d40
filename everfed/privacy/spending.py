"""Ledgers of what was released: of a client over all its runs, and of one run.

Both lie outside everything that is rolled back when a run is resumed: an entry is on the disk before the release leaves
the process. A release that is computed again with the same content is the same entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everfed.core.context import PlaceKey
from everfed.core.events import Observer
from everfed.core.message import State
from everfed.core.method import Method
from everfed.core.phase import Phase
from everfed.core.server import RunState
from everfed.privacy import accountant
from everfed.privacy.differential import LOCAL, NAME, BudgetSpent, DifferentialPrivacy
from everfed.store.ledger import PRIVACY_LEDGER, AppendedFile

DELTA = 1e-5
BARE = "bare"  # the entry of a run without noise


def protection(method: Method) -> DifferentialPrivacy | None:
    """The method's differential privacy, if it has one."""
    return next((part for part in method.parts if isinstance(part, DifferentialPrivacy)), None)


def hides_failures(method: Method) -> bool:
    """Does every client add noise of its own, under which a step that failed must look like any other?"""
    part = protection(method)
    return part is not None and part.kind == LOCAL


class ClientLedger:
    """What a client has released, whatever the recipe and the server. budget: the epsilon at `delta` that its replies
    may cost in all, 0 for no limit (they are still recorded).

    Under local noise an entry is a noised reply; under central noise it is one participation, whose noise the server is
    trusted to add. A run without noise is one entry that costs an infinite epsilon. A reply is charged before it is
    computed, at the most that it may cost, so that whether it is refused does not depend on the samples.
    """

    def __init__(self, folder: Path, budget: float = 0.0, delta: float = DELTA) -> None:
        if budget > 0:
            accountant.check_installed()
        self.file, self.budget, self.delta = AppendedFile(folder / PRIVACY_LEDGER), budget, delta
        entries = self.file.entries
        self._known = {(entry["run"], entry["release"]) for entry in entries}
        self._answered = {(entry["run"], entry["request"]) for entry in entries if "request" in entry}
        self._spent = Counter(float(entry["multiplier"]) for entry in entries if "multiplier" in entry)

    def check(self, method: Method) -> None:
        """Refuse a recipe whose replies would be bare. Raises BudgetSpent."""
        part = protection(method)
        if self.budget and (part is None or part.seed >= 0):
            why = "no [privacy.dp]" if part is None else "privacy.dp.seed set, so that its noise hides nothing"
            raise BudgetSpent(f"this client has a privacy budget of {self.budget:g}, and the recipe has {why}")

    def charge(self, method: Method, phase: Phase, run: str, place: PlaceKey, request: str) -> None:
        """Charge what the reply to a request may cost, once. request: a digest of all that the reply is computed from,
        but for the samples. Raises BudgetSpent."""
        part = protection(method)
        if part is None or part.seed >= 0:
            self._add(run, place, BARE, 0.0)
        elif part.most_values(phase):
            self._add(run, place, request, part.multiplier(part.most_values(phase)))

    def record(self, method: Method, run: str, place: PlaceKey, request: str, state: State) -> None:
        """Record the content of a reply before it is sent. state: the client's, after the step. The first content of a
        request is paid for; another one, of samples that changed, is a further release. Raises BudgetSpent."""
        part = protection(method)
        content = "" if part is None or part.seed >= 0 else str(state[NAME]["release"])
        if not content or (run, content) in self._known:
            return
        if (run, request) in self._known and (run, request) not in self._answered:
            self._answered.add((run, request))
            self._known.add((run, content))
            self.file.add({"run": run, "place": list(place), "release": content, "request": request})
        else:
            self._add(run, place, content, float(state[NAME]["multiplier"]))

    def _add(self, run: str, place: PlaceKey, release: str, multiplier: float) -> None:
        if (run, release) in self._known:
            return
        after = Counter({**self._spent, multiplier: self._spent[multiplier] + 1})
        if self.budget and (epsilon := accountant.composed(after, self.delta)) > self.budget:
            raise BudgetSpent(
                f"this client's privacy budget of {self.budget:g} does not allow the reply of round {place[0] + 1}: "
                f"epsilon would be {epsilon:.3f} (delta = {self.delta:g}); {self.spent():.3f} is spent by "
                f"{self._spent.total()} replies"
            )
        self.file.add({"run": run, "place": list(place), "release": release, "multiplier": multiplier})
        self._known.add((run, release))
        self._spent = after

    def spent(self) -> float:
        """Epsilon so far."""
        return accountant.composed(self._spent, self.delta)


class RunLedger:
    """What the server of a run has released. After a crash a run goes on from its last checkpoint, perhaps with other
    clients: the sums that it then releases at the same places are further releases."""

    def __init__(self, folder: Path, part: DifferentialPrivacy, notify: Observer) -> None:
        self.file, self.part, self.notify = AppendedFile(folder / PRIVACY_LEDGER), part, notify

    def record(self, state: RunState) -> None:
        """Record the last release before anything follows from it, and correct the number of releases in `state`.
        Raises BudgetSpent."""
        own, place = state.server[NAME], list(state.place)
        if not own.get("release"):
            return
        if all(entry["release"] != own["release"] for entry in self.file.entries):
            again = any(entry["place"] == place for entry in self.file.entries)
            self._require_budget(Counter([str(own["values"]), *self._values(lambda entry: True)]))
            self.file.add({"place": place, "release": own["release"], "values": own["values"]})
            if again:
                what = f"the release before place {place} was made before the run was resumed, with other content"
                self.notify({"event": "warning", "message": f"privacy.dp: {what}; it is counted a second time"})
        known = Counter(self._values(lambda entry: entry["place"] <= place))
        counted = dict(known | Counter(own["spent"]))
        if counted != own["spent"]:
            state.server = {**state.server, NAME: {**own, "spent": counted}}

    def _values(self, wanted: Callable[[dict[str, Any]], bool]) -> list[str]:
        return [str(entry["values"]) for entry in self.file.entries if wanted(entry)]

    def _require_budget(self, releases: Counter[str]) -> None:
        budget, epsilon = self.part.budget, self.part.spent(releases)
        if budget and epsilon > budget:
            raise BudgetSpent(
                f"privacy.dp.budget = {budget:g}: the next release would raise epsilon to {epsilon:.3f} with those in "
                f"{self.file.path}, which were made before the run was resumed (delta = {self.part.delta:g})"
            )
