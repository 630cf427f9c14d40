"""One phase under secure aggregation, on the server's side: which clients may be in the sum, and attempts at it.

A client whose keys, shares or vector are malformed is named and left out; while nothing was opened, the others begin
again with fresh keys. A sum that was opened before the server was stopped is opened again with the same clients only.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from everfed.core.client import Reply
from everfed.core.context import Place
from everfed.core.engine import Absent
from everfed.core.message import Message
from everfed.core.phase import Phase
from everfed.core.tree import Tree
from everfed.privacy.encoding import EncodingError, Form, Sums, common_form, form_from_text, form_to_text, sizes
from everfed.privacy.members import FEWEST, Members, are_keys, needed, set_text, sized, where
from everfed.privacy.members import KEYS as KEYS_SIZE
from everfed.privacy.secure import KEYS, LONGEST_SIGNED, NAME
from everfed.privacy.secure_sum import Left, SecureSum, TooFewClients

if TYPE_CHECKING:
    from everfed.privacy.secure_engine import Secured


class SecurePhase:
    """One phase's protocol: attempts at a sum, each with fresh keys, until one is opened."""

    def __init__(
        self, engine: Secured, phase: Phase, place: Place, replies: dict[int, Reply], absent: dict[int, Absent]
    ) -> None:
        self.engine, self.phase, self.place, self.absent = engine, phase, place, absent
        self.forms: dict[int, Form] = {}
        self.keys: dict[int, bytes] = {}
        self.signed: dict[int, str] = {}  # passed on to the others, who check it
        self.asked: dict[int, str] = {}
        self.broken = 0  # replies that are not finite
        for client, reply in sorted(replies.items()):
            self._advertised(client, reply.values.get(NAME, {}))
        self._leave_out_who_was_asked_otherwise()
        self._leave_out_other_forms()
        self._leave_out_large_forms()
        self.opened = engine.opened_set(place)
        self._keep_to_the_opened_set()

    def _advertised(self, client: int, values: Tree) -> None:
        allowed = frozenset(self.engine.part.weighing[self.phase.name])
        keys = sized(values.get("keys"), KEYS_SIZE)
        try:
            form = form_from_text(values.get("form"), allowed)
        except EncodingError as error:
            self.reject(client, f"malformed: {error}")
            return
        if keys is None or not are_keys(keys):
            self.reject(client, "malformed: its keys are not two points on the curve")
        else:
            self.forms[client], self.asked[client] = form, str(values.get("asked", ""))
            self.broken += bool(values.get("broken"))
            self._take_keys(client, keys, values)

    def _take_keys(self, client: int, keys: bytes, values: Tree) -> None:
        signed = values.get("signed")
        self.keys[client] = keys
        self.signed.pop(client, None)
        if isinstance(signed, str) and len(signed) <= LONGEST_SIGNED:
            self.signed[client] = signed

    def _leave_out_who_was_asked_otherwise(self) -> None:
        """The members' masks cancel only if all were asked the same."""
        if self.asked:
            usual = Counter(self.asked.values()).most_common(1)[0][0]
            for client in [client for client, asked in self.asked.items() if asked != usual]:
                self.reject(client, "malformed: it says that it was asked something else than the others")
                del self.forms[client], self.asked[client]

    def _leave_out_other_forms(self) -> None:
        """Each path has the form that most clients have; clients with another form are left out."""
        votes: dict[str, Counter[str]] = {}
        for form in self.forms.values():
            for path, entry in form.items():
                votes.setdefault(path, Counter())[form_to_text({path: entry})] += 1
        chosen = {path: count.most_common(1)[0][0] for path, count in votes.items()}
        for client, form in self.forms.items():
            if any(form_to_text({path: entry}) != chosen[path] for path, entry in form.items()):
                self.reject(client, "wrong shape: not the form of the others' replies")

    def _leave_out_large_forms(self) -> None:
        """Clients refuse a sum with more numbers than that; the largest form goes first."""
        largest = self.engine.part.largest_form(self.phase.name, self.engine.setup.facts)
        while (clients := self.clients) and _numbers(common_form(self.forms[c] for c in clients)) > largest:
            client = max(clients, key=lambda client: _numbers(self.forms[client]))
            self.reject(client, f"too large: a form of {_numbers(self.forms[client])} numbers")

    def _keep_to_the_opened_set(self) -> None:
        """A sum that was opened before the server was stopped is opened again with the same clients, or not at all."""
        for client in [] if self.opened is None else set(self.clients) - set(self.opened):
            self.absent[client] = Absent("late", "the sum of this phase was opened before, without it")

    @property
    def clients(self) -> list[int]:
        """Those that may be in the sum."""
        return [client for client in sorted(self.forms) if client not in self.absent]

    def reject(self, client: int, reason: str) -> None:
        self.absent[client] = Absent("rejected", reason)

    def run(self) -> Sums | None:
        """None where what was opened is no sum of replies. Where no value is in enough replies nothing is opened."""
        while True:
            self.require(self.clients, self.clients)
            if not self._has_a_sum():
                return Sums({}, 0.0, 0, 0, 0)
            try:
                return SecureSum(self, self._members()).run()
            except Left:
                self._renew_keys()

    def fewest(self, clients: int) -> int:
        """In how many replies a value must be, and how many must stay, of so many clients."""
        return needed(clients, self.engine.part.threshold)

    def _has_a_sum(self) -> bool:
        """Warns of values that too few clients have, which are not added up."""
        clients = self.clients
        counts = Counter(path for client in clients for path in self.forms[client])
        fewest = self.fewest(len(clients))
        for path, count in sorted(counts.items()):
            if count < fewest:
                which = f"{path} is in the replies of {count} of {len(clients)} clients, and {fewest} are needed"
                self.engine.notify({"event": "warning", "message": f"{self.where()}: {which}; it is not added up"})
        return any(count >= fewest for count in counts.values())

    def _members(self) -> Members:
        clients = self.clients
        forms = {client: form_to_text(self.forms[client]) for client in clients}
        number = f"{self.place.round}.{self.place.repeat}"
        bound = where(self.phase.name, number, self.asked[clients[0]])
        return Members({client: self.keys[client] for client in clients}, forms, bound, self.signed)

    def _renew_keys(self) -> None:
        self.require(self.clients, self.clients)
        for client, answer in self.request(KEYS, self.clients, {NAME: {}}).items():
            keys = sized(answer.get("keys"), KEYS_SIZE)
            if keys is None or not are_keys(keys):
                self.reject(client, "malformed: its new keys are not two points on the curve")
            else:
                self._take_keys(client, keys, answer)

    def request(self, step: str, clients: list[int], message: Message, counts: bool = True) -> dict[int, Tree]:
        answers, absent = self.engine.request(step, clients, message, self.place)
        if counts:  # a client whose vector has arrived counts, even if it is lost later
            self.absent.update(absent)
        return answers

    def require(self, have: list[int], of: list[int]) -> None:
        """Raises TooFewClients where a sum of the clients `have` may not be opened."""
        self.require_enough(have, of)
        if self.opened is not None and not set(self.opened) <= set(have):
            away = set_text(set(self.opened) - set(have))
            raise TooFewClients(
                f"{self.where()}: its sum was opened before the server was stopped, with clients "
                f"{set_text(self.opened)}; the difference to a sum without clients {away} would reveal their replies. "
                "Resume the run when they are back"
            )

    def require_enough(self, have: list[int], of: list[int]) -> None:
        wanted = self.fewest(len(of))
        if len(have) < wanted:
            raise TooFewClients(
                f"{self.where()}: {len(have)} clients are left, {wanted} are needed (at least {FEWEST}, and "
                f"privacy.threshold of the {len(of)} that began); resume the run when more are back"
            )

    def where(self) -> str:
        return f"secure aggregation of phase {self.phase.name!r} in round {self.place.round}"

    def warn(self, client: int, reason: str) -> None:
        """Name a client that lied, but whose vector counts."""
        event = {"event": "client", "client": client, "phase": self.phase.name, "kind": "rejected", "reason": reason}
        self.engine.notify(event)


def _numbers(form: Form) -> int:
    return sum(sizes(form))
