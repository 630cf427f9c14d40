"""Other users of the machine, who hold no key: what they can reach of a federation's processes.

Each test carries out an attack on real processes. A local user is anyone who can open a connection to loopback; what
only the owner may do needs a secret that stands in a file of mode 0600 and in the environment of the owner's processes.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everfed.federation import certificates
from tests.federation.field import descendants, field, runs, until
from tests.support.ports import free_port
from tests.support.waiting import HANG

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
pytestmark = pytest.mark.federation

STOLEN = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message, context):
    open({path!r}, "w").write("run by the client")
    return Message(RecordDict({{"header": ConfigRecord()}}), reply_to=message)
"""


def stranger(port: int, root: bytes | None = None) -> Any:
    """A client of Flower's Control API, as `flwr run` uses it, without any key."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    return ControlHttpClient.from_server_address(f"127.0.0.1:{port}", root is None, root, [version])


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("secure", [False, True], ids=["insecure", "TLS and keys"])
def test_without_the_operator_s_rights_no_run_is_started_listed_or_stopped(tmp_path: Path, secure: bool) -> None:
    """On loopback anyone may connect to the SuperLink's port; only SuperNodes' calls are answered there."""
    import httpx
    from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    with superlink(tmp_path, secure) as (port, root):
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        runtime = RuntimeHttpClient.from_server_address(f"127.0.0.1:{port}", root is None, root, [version])
        with stranger(port, root) as control, runtime:
            for call in (
                lambda: control.StartRun(StartRunRequest()),
                lambda: control.ListRuns(ListRunsRequest()),
                lambda: control.StopRun(StopRunRequest(run_id=1)),
                lambda: runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"])),
            ):
                with pytest.raises(httpx.HTTPStatusError) as caught:
                    call()
                assert caught.value.response.status_code == 403, caught.value.response.text
        refused = httpx.get(f"http{'s' if secure else ''}://127.0.0.1:{port}/docs", verify=False, timeout=HANG)
        assert refused.status_code == 403
    assert "refused POST /v1/control/start-run" in (tmp_path / "link" / "superlink.log").read_text()


@contextmanager
def superlink(folder: Path, secure: bool, port: int = 0) -> Iterator[tuple[int, bytes | None]]:
    """A real SuperLink as `everfed serve` starts it: (port, root certificate)."""
    from everfed.federation.superlink import Security, Settings, running

    security, root = None, None
    if secure:
        pki = folder / "pki"
        if not pki.exists():
            certificates.make_authority(pki)
            certificates.make_server(pki, ["127.0.0.1"])
        security = Security(pki / certificates.CA, pki / certificates.SERVER, pki / certificates.SERVER_KEY)
        root = security.ca.read_bytes()
    settings = Settings("127.0.0.1", port or free_port(), folder / "link", security)
    with running(settings, lambda line: None):
        yield settings.port, root


@pytest.mark.slow
def test_a_client_refuses_a_run_with_another_app_and_its_tasks_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitted with the owner's rights, so that it does reach the client: nothing of it is run there. The port where
    the SuperNode gives tasks answers nobody else."""
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    from everfed.federation.flower import app, link
    from everfed.federation.transport import GridTransport

    stolen = {**app.files(), "everfed_app/client.py": STOLEN.format(path=str(tmp_path / "stolen")).encode()}
    with field(tmp_path, 1) as one:
        log = one.sites[0].folder / "supernode.log"
        until(lambda: log.exists() and "SuperNode ID" in log.read_text())
        monkeypatch.setattr(app, "files", lambda: stolen)
        events: list[dict[str, Any]] = []
        transport = GridTransport(
            lambda: link.open_grid(link.Address("127.0.0.1", one.port)), lambda node: 0, events.append
        )

        def refused() -> bool:
            transport.connected()
            transport.receive()
            return "refused: a run was submitted with an app that is not everfed's" in log.read_text()

        until(refused)
        transport.close()
        assert not (tmp_path / "stolen").exists()
        ports = set(re.findall(r"127\.0\.0\.1:(\d+)", executors(os.getpid())))
        assert len(ports) == 2  # the SuperLink's door and the SuperNode's
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        for port in ports:
            with RuntimeHttpClient.from_server_address(f"127.0.0.1:{port}", True, None, [version]) as client:
                with pytest.raises(httpx.HTTPStatusError) as caught:
                    client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-clientapp"]))
                assert caught.value.response.status_code == 403


def executors(pid: int) -> str:
    """The arguments of Flower's executors, which every user of the machine can read. The secret is not among them."""
    found = [Path(f"/proc/{one}/cmdline").read_text() for one in descendants(pid) if runs(one, "flower-superexec")]
    return " ".join(found)


def test_a_port_that_another_user_bound_first_is_not_taken_for_a_superlink(tmp_path: Path) -> None:
    from everfed.federation.superlink import LinkError, Settings, running

    with socket.create_server(("127.0.0.1", 0)) as impostor:
        settings = Settings("127.0.0.1", impostor.getsockname()[1], tmp_path / "link")
        with pytest.raises(LinkError, match="no SuperLink that you started"), running(settings, lambda line: None):
            pass
