"""What a client's SuperNode gets from its SuperLink: everfed's own app, within the limit, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

import httpx

from everfed.federation.flower import app
from everfed.federation.flower.gate import Door, Patient, through
from everfed.federation.flower.supernode import Filter, Refused, _field, _fields
from everfed.federation.packet import FRAME_LIMIT

BUNDLE = b"everfed's own" * 300
HASH = hashlib.sha256(BUNDLE).hexdigest()
Answer = TypeVar("Answer")


def done(call: Awaitable[Answer]) -> Answer:
    with ThreadPoolExecutor(1) as thread:  # a browser's tests leave a running loop in this one
        return thread.submit(asyncio.run, call).result()  # type: ignore[arg-type]


async def called(
    to: Any, path: str, body: bytes = b"", headers: dict[str, str] | None = None, method: str = "POST"
) -> tuple[int, bytes]:
    sent: list[Any] = []
    left = [{"type": "http.request", "body": body}]
    pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]

    async def receive() -> Any:
        return left.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await to({"type": "http", "method": method, "path": path, "headers": pairs}, receive, send)
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent)


class SuperLink:
    """answers: by call. seen: what it was asked."""

    def __init__(self, **answers: bytes | list[bytes]) -> None:
        self.answers, self.seen = answers, list[httpx.Request]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        found = self.answers.get(request.url.path.rpartition("/")[2].replace("-", "_"), b"")
        content = found.pop(0) if isinstance(found, list) else found
        return httpx.Response(200, stream=httpx.ByteStream(content))

    def filter(self, limit: int = FRAME_LIMIT) -> Filter:
        made = Filter("fl.example.org:443", ssl.create_default_context(), BUNDLE, limit)
        made.client = httpx.AsyncClient(transport=httpx.MockTransport(self))
        return made

    def answer(self, call: str, body: bytes = b"", **more: Any) -> tuple[int, bytes]:
        return done(called(self.filter(**more), f"/v1/fleet/{call}", body))


def run(fab_id: str = "everfed/everfed-app", version: str = "1.0.0", fab_hash: str = HASH) -> bytes:
    """Flower's answer to get-run, with fields of other kinds beside those that are checked."""
    fields = _field(2, fab_id.encode()) + _field(3, version.encode()) + _field(5, fab_hash.encode())
    return _field(1, b"\x08\xff\xff\xff\x7f" + fields + b"\x59" + bytes(8) + _field(16, b"flwr-serverapp"))


def fab(content: bytes = BUNDLE, name: str = HASH) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, content))


def test_a_call_passes_with_its_signature_and_the_answer_comes_back() -> None:
    link = SuperLink(push_messages=b"answer")
    headers = {"flwr-signature": "abc", "host": "127.0.0.1", "content-type": "application/protobuf"}
    status = done(called(link.filter(), "/v1/fleet/push-messages", b"body", headers))
    assert status == (200, b"answer")
    [seen] = link.seen
    assert str(seen.url) == "https://fl.example.org:443/v1/fleet/push-messages".replace(":443", "")
    assert seen.read() == b"body" and seen.headers["flwr-signature"] == "abc"
    assert seen.headers["host"] == "fl.example.org"


def test_nothing_but_the_calls_of_supernodes_passes() -> None:
    link = SuperLink()
    for path, method in (
        ("/v1/control/start-run", "POST"),
        ("/v1/fleet/../control", "POST"),
        ("/v1/fleet/get-run", "GET"),
    ):
        assert done(called(link.filter(), path, method=method))[0] == 404
    assert link.seen == []


def test_everfed_s_own_app_passes() -> None:
    assert SuperLink(get_fab=fab()).answer("get-fab") == (200, fab())
    assert SuperLink(get_run=run()).answer("get-run") == (200, run())


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("get-fab", fab(b"another's")),
        ("get-fab", fab(b"another's", hashlib.sha256(b"another's").hexdigest())),
        ("get-fab", fab() + _field(1, _field(2, b"another's"))),  # the last of two fields counts
        ("get-fab", _field(1, _field(1, HASH.encode()) + _field(2, BUNDLE) + _field(2, b"another's"))),
        ("get-run", run(fab_hash="0" * 64)),
        ("get-run", run(version="1.0.0/../../../elsewhere")),
        ("get-run", run(fab_id="everfed/../other")),
        ("get-run", run() + run(version="2")),
        ("get-run", _field(1, _fields(run())[1][0] + _field(3, b"2"))),
        ("get-run", b""),
        ("get-run", b"\xff"),
        ("get-run", b"\x0b"),
        ("get-run", _field(1, _fields(run())[1][0] + b"\x12\x7f")),  # a field that is not whole
    ],
)
def test_another_app_and_what_cannot_be_read_are_refused(
    call: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    link = SuperLink(**{call.replace("-", "_"): body})
    status, text = link.answer(call)
    assert status == 413 and b"another" not in text
    assert "refused: " in caplog.text


def test_a_message_beyond_the_limit_is_not_passed_on_and_the_next_one_is() -> None:
    link = SuperLink(pull_object=bytes(600), pull_messages=[b"a message", b"", b"another"])
    made = link.filter(limit=1000)
    calls = [
        "pull-messages",
        "pull-object",
        "pull-object",
        "pull-messages",
        "pull-object",
        "pull-messages",
        "pull-object",
    ]
    assert [done(called(made, f"/v1/fleet/{call}"))[0] for call in calls] == [200, 200, 413, 200, 413, 200, 200]


def test_an_answer_of_any_size_is_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everfed.federation.flower.supernode.BODY", 0)
    assert SuperLink(pull_messages=b"x").answer("pull-messages")[0] == 413


def test_a_superlink_that_is_away_is_asked_again_by_the_supernode(caplog: pytest.LogCaptureFixture) -> None:
    made = SuperLink().filter()

    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route")

    made.client = httpx.AsyncClient(transport=httpx.MockTransport(away))
    assert done(called(made, "/v1/fleet/pull-messages"))[0] == 503
    assert "cannot reach the SuperLink at https://fl.example.org:443: no route" in caplog.text


def test_an_answer_that_means_not_yet_is_held_back() -> None:
    """No message, no message, a message: one answer. An object that is announced and not there is held, too."""
    link = SuperLink(pull_messages=[b"", b"", b"a message"], pull_object=[b"\x08\x01", b"\x08\x01\x10\x01\x1a\x01x"])
    patient = Patient(link.filter(), 0.0)
    assert done(called(patient, "/v1/fleet/pull-messages", b"node 5")) == (200, b"a message")
    assert [seen.read() for seen in link.seen] == [b"node 5"] * 3
    assert done(called(patient, "/v1/fleet/pull-object"))[1].endswith(b"x")


def test_it_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everfed.federation.flower.gate.HOLD", 0.05)
    assert done(called(Patient(SuperLink().filter(), 0.0), "/v1/fleet/pull-messages")) == (200, b"")


def test_a_door_opens_with_the_secret_that_http_clients_send_to_a_proxy() -> None:
    """httpx, which Flower's commands use, takes proxy and secret from the environment."""
    env = through(8000, "s3cret", {"HTTP_PROXY": "http://other", "NO_PROXY": "*", "PATH": "/bin"})
    assert env == {"PATH": "/bin", "http_proxy": "http://everfed:s3cret@127.0.0.1:8000"}
    proxy = httpx.Proxy(env["http_proxy"])
    door, words = Door(SuperLink(acquire_task=b"task").filter(), "s3cret"), {}
    assert done(called(door, "/v1/fleet/pull-messages", headers=words))[0] == 403
    assert proxy.raw_auth is not None
    wrong = {"proxy-authorization": "Basic ZXZlcmZlZDpndWVzcw=="}
    assert done(called(door, "/v1/fleet/pull-messages", headers=wrong))[0] == 403
    right = httpx.HTTPTransport(proxy=proxy)._pool._proxy_headers  # type: ignore[attr-defined]
    words = {name.decode().lower(): value.decode() for name, value in right}
    assert done(called(door, "/v1/fleet/pull-messages", headers=words))[0] == 200


@pytest.mark.federation
def test_the_bundle_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    made = [app.bundle(tmp_path / name) for name in ("a", "b")]
    assert made[0] == made[1] == app.bundle(tmp_path / "a")


def test_messages_that_cannot_be_read_are_refused() -> None:
    for message in (b"\xff", b"\x0b", b"\x0a\xff", b"\xff" * 40):
        with pytest.raises(Refused):
            _fields(message)
