"""What federations meet: processes killed, a link cut, garbage, a full disk, a wrong clock. Each ends in the result of
a run in which nothing happened, and the events say what did."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everfed.federation.local import listen, socket_path
from everfed.federation.packet import PROTOCOL, Packet
from tests.federation.field import Field, Site, events, expected, field, outcome, until

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
pytestmark = [pytest.mark.federation, pytest.mark.slow]

METHOD = "fedgp+der"  # phases `train` and `reference` in every round


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two tasks of two rounds in simulation."""
    return expected(tmp_path_factory.mktemp("reference"), METHOD)


def serve(two: Field, strike: Callable[[dict[str, Any]], None], name: str = "run") -> Path:
    """Run the server; `strike` hears of every event and may do harm."""
    return two.serve(two.recipe(method=METHOD, rounds=2), name, strike)


def after(phase: str, round_index: int, harm: Callable[[], Any]) -> Callable[[dict[str, Any]], None]:
    """Harm that starts, beside the run, when a phase is over: it falls into the next."""
    done: list[bool] = []

    def strike(event: dict[str, Any]) -> None:
        if not done and (event["event"], event.get("phase"), event.get("round")) == ("phase", phase, round_index):
            done.append(True)
            threading.Thread(target=harm, daemon=True).start()

    return strike


# processes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("phase", ["train", "reference"])
def test_a_supernode_killed_in_a_phase(phase: str, tmp_path: Path, reference: dict[str, Any]) -> None:
    """It is killed when its step is on disk and its reply is not sent; it comes back under a new number."""
    with field(tmp_path, 2) as two:
        site = two.sites[1]
        before = "reference" if phase == "train" else "train"

        def kill() -> None:
            known = site.steps()
            until(lambda: site.steps() != known)
            site.kill("supernode")

        out = serve(two, after(before, 1 if phase == "reference" else 0, kill))
        assert outcome(out) == reference
        assert any("the supernode ended with code -9" in line for line in site.said)
        assert sum(event["kind"] == "connected" for event in events(out, "client")) == 3


def test_a_worker_killed_in_a_phase(tmp_path: Path, reference: dict[str, Any]) -> None:
    with field(tmp_path, 2) as two:
        out = serve(two, after("train", 0, lambda: two.sites[0].kill("worker")))
        assert outcome(out) == reference
        assert any("the worker ended with code -9" in line for line in two.sites[0].said)


def test_the_superlink_killed_and_restarted(tmp_path: Path, reference: dict[str, Any]) -> None:
    with field(tmp_path, 2) as two:
        out = serve(two, after("train", 1, lambda: os.kill(two.link_pid(), signal.SIGKILL)))
        assert outcome(out) == reference
        assert any("the SuperLink ended with code -9" in line for line in two.said)


def test_the_server_killed_in_the_middle_of_phases_and_started_again(tmp_path: Path, reference: dict[str, Any]) -> None:
    """Clients stay connected the first time; the second time they are restarted, too."""
    with field(tmp_path, 2, link=False) as two:
        two.recipe(method=METHOD, rounds=2)
        words = ["serve", "small-2.toml", "--method", METHOD, "--set", "method.memory.size=10", "--out", "run"]
        words += ["--insecure", "--port", str(two.port), "--checkpoint-every", "0"]
        out = tmp_path / "run"
        for phases in (2, 5):
            server = two.command(*words)
            until(lambda: len(events(out, "phase")) >= phases or server.poll() is not None)  # noqa: B023 - used at once
            known = two.sites[0].steps()
            until(lambda: two.sites[0].steps() != known or server.poll() is not None)  # noqa: B023 - used at once
            assert server.poll() is None, (tmp_path / "command.log").read_text()[-2000:]
            server.kill()
            server.wait()
        for name in ("worker", "supernode"):
            two.sites[1].kill(name)
        assert two.command(*words).wait() == 0, (tmp_path / "command.log").read_text()[-2000:]
        assert outcome(out) == reference
        assert len(events(out, "resume")) == 2


# the network, the disk, the clock -------------------------------------------------------------------------------------
def test_garbage_from_a_client_is_rejected_until_it_makes_sense(tmp_path: Path, reference: dict[str, Any]) -> None:
    with field(tmp_path, 2) as two:
        two.sites[1].close()
        said: list[bool] = []
        joining = two.joining(1)
        with false_worker(joining.folder, said):
            two.sites[1] = Site(joining, without=("worker",))

            def come_to_its_senses() -> None:
                until(lambda: len(said) >= 3)
                two.sites[1].close()
                two.sites[1] = Site(joining)

            threading.Thread(target=come_to_its_senses, daemon=True).start()
            out = serve(two, lambda event: None)
        assert outcome(out) == reference
        rejected = [event for event in events(out, "client") if event["kind"] == "rejected"]
        assert rejected and {event["client"] for event in rejected} == {1}


@contextmanager
def false_worker(folder: Path, said: list[bool]) -> Iterator[None]:
    """Introduces itself well, and answers nonsense to everything else."""
    from everfed.federation import packet as wire

    listener = listen(socket_path(folder))

    def lie() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                request = wire.receive(connection)
                hello = request.header["kind"] == "hello"
                honest = Packet({"protocol": PROTOCOL, "kind": "hello", "name": "site-1", "client": 1})
                said.extend([] if hello else [True])
                garbage = Packet({"protocol": PROTOCOL, "kind": "reply"}, {"x": b"\0" * 99})
                wire.send(connection, honest if hello else garbage)

    threading.Thread(target=lie, daemon=True).start()
    try:
        yield
    finally:
        listener.close()


def is_full(event: dict[str, Any]) -> bool:
    """Is it a failure for want of space: of the step, or of the log that comes before it?"""
    return any(said in event["reason"] for said in ("No space left", "its audit log cannot be written"))


def test_a_full_disk_on_a_client(tmp_path: Path, reference: dict[str, Any]) -> None:
    folder = tmp_path / "c1"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with field(tmp_path, 2) as two:
            filler = folder / "filler"

            def fill() -> None:
                with suppress(OSError), open(filler, "wb", buffering=0) as file:
                    while True:
                        file.write(b"\0" * 4096)
                until(lambda: any(is_full(event) for event in events(tmp_path / "run", "client")))
                filler.unlink()

            out = serve(two, after("train", 0, fill))
            assert outcome(out) == reference
            assert {e["client"] for e in events(out, "client") if is_full(e)} == {1}
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_client_cut_off_and_healed(tmp_path: Path, reference: dict[str, Any]) -> None:
    """Client 1 lives in a network namespace of its own; its link goes down for twenty seconds in a phase."""
    made = [
        "ip netns add everfed-test",
        "ip link add everfed0 type veth peer name everfed1 netns everfed-test",
        "ip addr add 10.123.45.1/24 dev everfed0",
        "ip link set everfed0 up",
        "ip -n everfed-test addr add 10.123.45.2/24 dev everfed1",
        "ip -n everfed-test link set everfed1 up",
        "ip -n everfed-test link set lo up",
    ]
    try:
        for command in made:
            done = subprocess.run(command.split(), capture_output=True)
            if done.returncode:
                pytest.skip(f"network namespaces are not permitted here: {done.stderr.decode().strip()}")
        with field(tmp_path, 2) as two, relay(("10.123.45.1", two.port), ("127.0.0.1", two.port)):
            two.sites[1].close()
            joining = replace(two.joining(1), server=f"10.123.45.1:{two.port}")
            two.sites[1] = Site(joining, prefix=("ip", "netns", "exec", "everfed-test"))

            def cut() -> None:
                subprocess.run(["ip", "link", "set", "everfed0", "down"], check=True)
                threading.Event().wait(20)
                subprocess.run(["ip", "link", "set", "everfed0", "up"], check=True)

            out = serve(two, after("train", 0, cut))
            assert outcome(out) == reference
    finally:
        subprocess.run(["ip", "link", "del", "everfed0"], capture_output=True)
        subprocess.run(["ip", "netns", "del", "everfed-test"], capture_output=True)


@contextmanager
def relay(outer: tuple[str, int], inner: tuple[str, int]) -> Iterator[None]:
    """The SuperLink binds loopback; this lets the namespace reach it."""
    listener = socket.create_server(outer)

    def pump(source: Any, target: Any) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(inner)
            except OSError:
                return
            for pair in ((near, far), (far, near)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        listener.close()


@pytest.mark.parametrize("seconds", [-200, 900])
def test_a_client_whose_clock_is_off(seconds: int, tmp_path: Path, reference: dict[str, Any]) -> None:
    """Every process of client 1 believes in another time. Flower takes signatures that are up to five minutes old, and
    hardly any from the future: that client is refused until its clock is put right."""
    off = tmp_path / "off"
    off.write_text(str(seconds))
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK.format(path=str(off)))
    with field(tmp_path, 2) as two:
        two.sites[1].close()
        path = os.pathsep.join([str(tmp_path / "clock"), os.environ.get("PYTHONPATH", "")])
        site = two.sites[1] = Site(two.joining(1), env={"PYTHONPATH": path})

        def put_right() -> None:
            until(lambda: any("the supernode ended" in line for line in site.said))
            off.write_text("0")

        if seconds > 0:
            threading.Thread(target=put_right, daemon=True).start()
        assert outcome(serve(two, lambda event: None)) == reference
        assert any("the supernode ended" in line for line in site.said) == (seconds > 0)


# a worker's libraries look into datetime from C, so there only time.time is wrong
CLOCK = """\
import datetime
import sys
import time

real = time.time


def shifted():
    with open({path!r}) as file:
        return float(file.read())


class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=shifted())


time.time = lambda: real() + shifted()
if "everfed.federation.worker" not in sys.orig_argv:
    datetime.datetime = Shifted
"""


# for long -------------------------------------------------------------------------------------------------------------
def test_a_small_soak(tmp_path: Path) -> None:
    """The benchmark's soak, twelve rounds with a fault every third."""
    from benchmarks.federation_soak import soak

    seen = soak(tmp_path, rounds=12, clients=2, every=3, seed=1)
    assert seen["same_bits"]
    assert seen["faults"]
    assert seen["client_files"] <= 12
