"""A registered client with code of its own: its worker and its SuperNode lie, one lie for each request.

python -m benchmarks.campaign_lies worker --plan FILE ARGUMENTS OF everfed.federation.worker
python -m benchmarks.campaign_lies supernode ARGUMENTS OF everfed.federation.flower.supernode

The plan names the lies in their order; each request takes the next one, and its name, phase and place are appended to
FILE.sent. The step itself is made, so that the client's state stays the one of an honest client. When the plan is used
up, the client is honest.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from everfed.core import tree
from everfed.federation import packet as wire
from everfed.federation import worker
from everfed.federation.audit import Audited
from everfed.federation.packet import Packet
from everfed.federation.request import STEPS, Request
from everfed.privacy.secure_client import AGREE, MASK, NAME, SHARE, UNMASK
from tests.core.test_tree_hostile import POISONED
from tests.support.secure_lies import IGNORED, LEFT_OUT

NODE = "campaign"  # in the header of an answer: what the SuperNode is to do with it
LYING_FILE = "EVERFED_LIE"  # names the file of what the SuperNode is to do with the reply that it sends next
LYING = Path(os.environ.get(LYING_FILE, os.devnull))
Lie = Callable[["Liar", Packet], Packet]


class Raw(Packet):
    """Bytes on the worker's socket that are no frame."""

    def __init__(self, data: bytes) -> None:
        super().__init__({}, {"": data})


class Liar(Audited):
    """A site that answers with lies."""

    plan: Path
    lies: list[str]
    rng: random.Random

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rng, self.earlier, self.last_round = random.Random(str(self.plan)), [], -1  # type: ignore[var-annotated]

    def answer(self, packet: Packet) -> Packet:
        honest = super().answer(packet)
        if packet.header.get("kind") != STEPS or honest.header.get("kind") != "reply":
            return honest
        step = Request.of(packet).steps[0]
        found = self._next(step.phase, step.place[0])
        self.earlier.append(honest)
        if found is None:
            return honest
        self._note(found, step.phase, step.place)
        return LIES[found](self, honest)

    def _next(self, phase: str, round_index: int) -> str | None:
        """The lie for this request. Lies of secure aggregation wait for their step, one in each round."""
        sent = self._sent()
        if sent == len(self.lies):
            return None
        name = self.lies[sent]
        if name not in SECURE:
            return name
        if SECURE[name] != phase or round_index == self.last_round:
            return None
        self.last_round = round_index
        return name

    def _sent(self) -> int:
        path = sent_path(self.plan)
        return len(path.read_text().splitlines()) if path.exists() else 0

    def _note(self, name: str, phase: str, place: Any) -> None:
        with open(sent_path(self.plan), "a") as file:
            file.write(json.dumps({"lie": name, "phase": phase, "place": list(place)}) + "\n")


def sent_path(plan: Path) -> Path:
    return plan.with_name(f"{plan.name}.sent")


# packets --------------------------------------------------------------------------------------------------------------
def header(**changes: Any) -> Lie:
    """Other values in the header; None removes one."""

    def lie(liar: Liar, honest: Packet) -> Packet:
        changed = {**honest.header, **changes}
        return Packet({name: value for name, value in changed.items() if value is not None}, honest.pieces)

    return lie


def pieces(change: Callable[[Liar, dict[str, bytes]], dict[str, bytes]]) -> Lie:
    return lambda liar, honest: Packet(honest.header, change(liar, dict(honest.pieces)))


def piece(change: Callable[[Liar, bytes], bytes]) -> Lie:
    """Another first piece."""
    return pieces(lambda liar, found: {**found, "reply.0": change(liar, found["reply.0"])})


def waiting(seconds: float) -> Lie:
    def lie(liar: Liar, honest: Packet) -> Packet:
        time.sleep(seconds)
        return Raw(b"")

    return lie


def raw(change: Callable[[random.Random, bytes], bytes]) -> Lie:
    return lambda liar, honest: Raw(change(liar.rng, b"".join(wire.to_frame(honest))))


def poisoned(data: bytes) -> Lie:
    return piece(lambda liar, found: data)


PACKETS: dict[str, Lie] = {
    **{f"no {name}": header(**{name: None}) for name in ("protocol", "kind", "request", "reason", "missing", "holds")},
    **{f"protocol {number}": header(protocol=number) for number in (0, 1, 3, -1, 10**30)},
    "a protocol of text": header(protocol="2"),
    "a protocol that is true": header(protocol=True),
    **{f"kind {kind}": header(kind=kind) for kind in ("hello", "steps", "notice", "", "reply\0", "x" * 10_000)},
    "kind of a number": header(kind=7),
    "refused": header(kind="refused", reason="no"),
    "failed": header(kind="failed", reason="no"),
    "failed with a megabyte of reasons": header(kind="failed", reason="x" * (1 << 20)),
    "failed with a reason of control characters": header(kind="failed", reason="\x1b[2J\r\n\0" * 50),
    "missing everything": header(kind="missing", missing='["recipe"]'),
    "missing ten thousand pieces": header(kind="missing", missing=json.dumps([f"{n:08}" for n in range(10_000)])),
    "missing what is no list": header(kind="missing", missing="{}"),
    "missing what is no JSON": header(kind="missing", missing="[" * 5000),
    "holds numbers": header(holds="[1, 2]"),
    "holds a hundred thousand names": header(holds=json.dumps(["x"] * 100_000)),
    "another request": header(request="0" * 32),
    "a request of a number": header(request=5),
    "a header value of infinity": header(kind=float("inf")),
    "a header of two megabytes": header(odd="x" * (2 << 20)),
    "an empty packet": lambda liar, honest: Packet({}),
    "no pieces": pieces(lambda liar, found: {}),
    "a piece too many": pieces(lambda liar, found: {**found, f"reply.{len(found)}": b"x"}),
    "pieces under other names": pieces(lambda liar, found: {f"{n}x": d for n, d in found.items()}),
    "a piece that leads elsewhere": pieces(lambda liar, found: {"../../reply.0": found["reply.0"]}),
    "an empty piece": piece(lambda liar, found: b""),
    "half a piece": piece(lambda liar, found: found[: len(found) // 2]),
    "a piece without its last byte": piece(lambda liar, found: found[:-1]),
    "a piece with a byte too many": piece(lambda liar, found: found + b"\0"),
    "a piece of 16 MiB": piece(lambda liar, found: bytes(16 << 20)),
    "three hundred pieces": pieces(lambda liar, found: {f"reply.{n}": b"x" for n in range(300)}),
    "a replayed reply": lambda liar, honest: next((one for one in liar.earlier if one is not honest), Packet({})),
    **{f"random bytes {n}": piece(lambda liar, found: liar.rng.randbytes(liar.rng.randrange(1, 5000)))
       for n in range(10)},
    **{f"poisoned: {name}": poisoned(data) for name, data in POISONED.items()},
    # frames on the worker's socket
    "no answer": raw(lambda rng, whole: b""),
    "half a frame": raw(lambda rng, whole: whole[: len(whole) // 2]),
    "three bytes": raw(lambda rng, whole: whole[:3]),
    "a head of four gigabytes": raw(lambda rng, whole: b"\xff" * 4 + whole),
    **{f"a frame of random bytes {n}": raw(lambda rng, whole: rng.randbytes(500)) for n in range(5)},
    "nothing for six seconds": waiting(6.0),
}  # fmt: skip


# what a reply holds ---------------------------------------------------------------------------------------------------
def content(change: Callable[[dict[str, Any]], Any]) -> Lie:
    """A well-formed packet with another reply in its first piece."""

    def lie(liar: Liar, honest: Packet) -> Packet:
        found = tree.from_bytes(honest.pieces["reply.0"])
        changed = change(found)
        return Packet(honest.header, {**honest.pieces, "reply.0": tree.to_bytes(found if changed is None else changed)})

    return lie


def first(change: Callable[[torch.Tensor], Any]) -> Lie:
    """Another value instead of the first tensor."""

    def change_first(reply: dict[str, Any]) -> None:
        for values in reply["values"].values():
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    values[name] = change(value)
                    return

    return content(change_first)


def field(name: str, value: Any) -> Lie:
    return content(lambda reply: {**reply, name: value})


CONTENTS: dict[str, Lie] = {
    **{f"{n} everywhere": first(lambda t, n=n: torch.full_like(t, float(n)))
       for n in ("nan", "inf", "-inf", "1e30", "-1e30", "2e8", "9.9e7")},
    "one NaN": first(lambda t: torch.where(torch.arange(t.numel()).reshape(t.shape) == 0, float("nan"), t)),
    "one number too many": first(lambda t: torch.cat([t.reshape(-1), torch.zeros(1, dtype=t.dtype)])),
    "one number too few": first(lambda t: t.reshape(-1)[1:].clone()),
    "another dimension": first(lambda t: t[None].clone()),
    "no numbers": first(lambda t: t.reshape(-1)[:0].clone()),
    "one number for all": first(lambda t: t.reshape(-1)[0].clone()),
    **{f"numbers of type {kind}": first(lambda t, k=kind: t.to(getattr(torch, k))) for kind in
       ("float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")},
    "text": first(lambda t: "text"),
    "a number": first(lambda t: 5),
    "a number beyond every float": first(lambda t: 10**400),
    "a dictionary": first(lambda t: {"a": t}),
    "a deep dictionary": first(lambda t: {"a": {"b": {"c": {"d": t}}}}),
    "a part that does not exist": content(lambda r: {**r, "values": {**r["values"], "evil": {"x": torch.ones(2)}}}),
    "a value that is not declared": content(
        lambda r: {**r, "values": {n: {**v, "../evil": torch.ones(2)} for n, v in r["values"].items()}}),
    "values that are a number": field("values", 3),
    "values that are a tensor": field("values", torch.ones(3)),
    "a part that is a number": content(lambda r: {**r, "values": dict.fromkeys(r["values"], 3)}),
    **{f"{name} {value!r}": field(name, value) for name in ("samples", "steps") for value in
       (-1, 1.5, "7", True, None, 10**13, float("nan"))},
    **{f"loss {value!r}": field("loss", value) for value in (float("nan"), float("inf"), "x", True)},
    "no samples": content(lambda r: {k: v for k, v in r.items() if k != "samples"}),
    "a claim of a billion samples": field("samples", 10**9),  # counts for what it is: weights are uniform here
}  # fmt: skip

# what the SuperNode does with the answer ------------------------------------------------------------------------------
NODE_LIES = ("announced, never sent", "half of the objects", "no reply", "an error of the app", "an unknown error",
             "no records", "a record too many", "a header of numbers", "pieces that are no bytes",
             "arrays of another type", "a reply to another message", "objects under other names")  # fmt: skip


def by_node(name: str) -> Lie:
    return lambda liar, honest: Packet({**honest.header, NODE: name}, honest.pieces)


# secure aggregation ---------------------------------------------------------------------------------------------------
def values(change: Callable[[dict[str, Any]], Any]) -> Lie:
    def of_part(reply: dict[str, Any]) -> None:
        reply["values"][NAME] = change(dict(reply["values"].get(NAME, {})))

    return content(of_part)


def garbage(kind: str) -> Callable[[dict[str, Any]], Any]:
    """Every value of the reply of another kind."""
    made: dict[str, Any] = {"floats": torch.full((66,), float("nan")), "numbers": 2**62, "text": "x" * 1000,
                            "empty": torch.zeros(0, dtype=torch.uint8), "long": torch.zeros(1 << 20, dtype=torch.uint8),
                            "matrix": torch.zeros(3, 3, dtype=torch.int64)}  # fmt: skip
    return lambda reply: dict.fromkeys(reply, made[kind])


def replayed(step: str) -> Lie:
    """The values that it sent at this step in an earlier round."""

    def lie(liar: Liar, honest: Packet) -> Packet:
        now = tree.from_bytes(honest.pieces["reply.0"])["values"].get(NAME, {})
        for one in liar.earlier[:-1]:
            found = tree.from_bytes(one.pieces["reply.0"])
            if found["values"].get(NAME, {}).keys() == now.keys():
                return Packet(honest.header, {**honest.pieces, "reply.0": one.pieces["reply.0"]})
        return Packet({})

    return lie


KINDS = ("floats", "numbers", "text", "empty", "long", "matrix")
SECURE_LIES: dict[str, tuple[str, Lie]] = {
    **{name: (step, values(lie)) for name, (step, lie) in {**LEFT_OUT, **IGNORED}.items()},
    **{f"{step}: {kind}": (step, values(garbage(kind))) for step in ("train", SHARE, MASK, AGREE, UNMASK) for kind in
       KINDS},
    **{f"{step}: replayed": (step, replayed(step)) for step in ("train", SHARE, AGREE, UNMASK)},
    **{f"{step}: random bytes": (step, PACKETS["random bytes 0"]) for step in ("train", SHARE, MASK, AGREE, UNMASK)},
    "one complaint": (MASK, values(lambda reply: {"complaints": torch.tensor([1])})),
    "a vector of random numbers": (MASK, values(lambda reply: {
        **reply, "narrow": torch.randint(-(1 << 31), 1 << 31, reply["narrow"].shape, dtype=torch.int32)})),
    "counts of random numbers": (MASK, values(lambda reply: {
        **reply, "wide": torch.randint(-(1 << 62), 1 << 62, reply["wide"].shape)})),
}  # fmt: skip
SECURE = {name: step for name, (step, _) in SECURE_LIES.items()}
LIES: dict[str, Lie] = {**PACKETS, **CONTENTS, **{f"SuperNode: {name}": by_node(name) for name in NODE_LIES}}
PLAIN = tuple(LIES)
LIES |= {name: lie for name, (_, lie) in SECURE_LIES.items()}


# processes ------------------------------------------------------------------------------------------------------------
def run_worker(arguments: list[str]) -> None:
    plan = Path(arguments[arguments.index("--plan") + 1])
    Liar.plan, Liar.lies = plan, json.loads(plan.read_text())
    honest = wire.send

    def send(connection: Any, packet: Packet) -> None:
        connection.sendall(packet.pieces[""]) if isinstance(packet, Raw) else honest(connection, packet)

    wire.send = send  # type: ignore[assignment]
    worker.Audited = Liar  # type: ignore[misc]
    index = arguments.index("--plan")
    worker.main([*arguments[:index], *arguments[index + 2 :]])


def run_supernode(arguments: list[str]) -> None:
    """The SuperNode's calls to push a reply are not passed on as they are; its ClientApp is `run_clientapps`."""
    from everfed.federation.flower import client_app, supernode
    from everfed.federation.flower.gate import CALL, PUSH, answer, whole_body

    class LyingFilter(supernode.Filter):
        pushed = 0  # objects of the reply that is being sent

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            lie = LYING.read_text() if LYING.exists() else ""
            if scope["path"] == f"{CALL}push-messages":
                self.pushed = 0
            self.pushed += scope["path"] == PUSH
            left_out = lie == "announced, never sent" or (lie == "half of the objects" and self.pushed > 1)
            if lie == "no reply" and scope["path"] == f"{CALL}push-messages":
                await answer(send, 500, lie)
            elif scope["path"] == PUSH and left_out:
                await answer(send, 200, body=b"\x08\x01")
            elif scope["path"] == PUSH and lie == "objects under other names":
                body = await whole_body(receive)
                mangled = body[:-16] + os.urandom(16)

                async def receive_mangled() -> Any:
                    return {"type": "http.request", "body": mangled}

                await super().__call__(scope, receive_mangled, send)
            else:
                await super().__call__(scope, receive, send)

    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    os.environ[LYING_FILE] = str(Path(arguments[arguments.index("--home") + 1]) / "lie")
    globals()["LYING"] = Path(os.environ[LYING_FILE])
    client_app.MODULE, supernode.Filter = "benchmarks.campaign_lies", LyingFilter  # type: ignore[misc]
    supernode.main(arguments)


def run_clientapps(path: str) -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

    from everfed.federation.flower import client_app

    header_of, honest = {"a": ConfigRecord({"a": 1})}, client_app.to_records
    contents: dict[str, Callable[[RecordDict], Any]] = {
        "no records": lambda found: RecordDict({}),
        "a record too many": lambda found: RecordDict({**found, **header_of}),
        "a header of numbers": lambda found: RecordDict({"header": ConfigRecord({"kind": [1, 2]})}),
        "pieces that are no bytes": lambda found: RecordDict({**found, "small": ConfigRecord({"reply.0": 5})}),
        "arrays of another type": lambda found: RecordDict(
            {**found, "large": ArrayRecord({"x": Array("uint8", (3,), "numpy.ndarray", b"abc")})}
        ),
    }

    def records(packet: Packet) -> Any:
        lie = str(packet.header.pop(NODE, ""))
        Path(os.environ[LYING_FILE]).write_text(lie)  # the SuperNode sends this reply next
        if lie.endswith("error of the app") or lie == "an unknown error":
            return Error(2 if lie.endswith("app") else 77, "x" * 5000)
        return contents.get(lie, lambda found: found)(honest(packet))

    def message(content: Any, reply_to: Message) -> Message:
        reply = Message(content, reply_to=reply_to)
        if Path(os.environ[LYING_FILE]).read_text() == "a reply to another message":
            reply.metadata.__dict__["_reply_to_message_id"] = "0" * 64
        return reply

    client_app.to_records, client_app.Message = records, message  # type: ignore[assignment,misc]
    client_app.fork_for_messages(Path(path))


RUN = {"worker": run_worker, "supernode": run_supernode}

if __name__ == "__main__":
    if sys.argv[1] in RUN:
        RUN[sys.argv[1]](sys.argv[2:])
    else:
        run_clientapps(sys.argv[1])
