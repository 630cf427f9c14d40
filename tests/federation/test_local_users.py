"""Other users of the machine, who hold no key: what they can reach of a federation's processes.

Each test carries out an attack on real processes. A local user is anyone who can open a connection to loopback; what
only the owner may do goes through a unix socket in a folder of mode 0700.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everfed.federation import certificates
from tests.federation.field import field, until
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


def foreign_app(path: Path) -> Any:
    """A Flower app that writes a file as the user who runs it."""
    from flwr.cli.build import build_fab_from_files
    from flwr.supercore.fab import Fab

    from everfed.federation.flower.app import files

    content, _ = build_fab_from_files({**files(), "everfed_app/client.py": STOLEN.format(path=str(path)).encode()})
    return Fab(hashlib.sha256(content).hexdigest(), content, {})


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("secure", [False, True], ids=["insecure", "TLS and keys"])
def test_without_the_operator_s_rights_no_run_is_started_listed_or_stopped(tmp_path: Path, secure: bool) -> None:
    """On loopback anyone may connect to the SuperLink's port; only SuperNodes' calls are answered there."""
    import httpx
    from flwr.common.serde import fab_to_proto
    from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    with superlink(tmp_path, secure) as (port, root):
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        runtime = RuntimeHttpClient.from_server_address(f"127.0.0.1:{port}", root is None, root, [version])
        with stranger(port, root) as control, runtime:
            for call in (
                lambda: control.StartRun(StartRunRequest(fab=fab_to_proto(foreign_app(tmp_path / "stolen")))),
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
def superlink(folder: Path, secure: bool) -> Iterator[tuple[int, bytes | None]]:
    """A real SuperLink as `everfed serve` starts it: (port, root certificate)."""
    from everfed.federation.superlink import Security, Settings, running

    security, root = None, None
    if secure:
        pki = folder / "pki"
        certificates.make_authority(pki)
        certificates.make_server(pki, ["127.0.0.1"])
        security = Security(pki / certificates.CA, pki / certificates.SERVER, pki / certificates.SERVER_KEY)
        root = security.ca.read_bytes()
    settings = Settings("127.0.0.1", free_port(), folder / "link", security)
    with running(settings, lambda line: None):
        yield settings.port, root


@pytest.mark.slow
def test_a_client_refuses_a_run_with_another_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted with the owner's rights, so that it does reach the client: nothing of it is run there, and both ends
    name the refusal."""
    from everfed.federation.flower import link
    from everfed.federation.flower.grid import GridTransport

    with field(tmp_path, 1) as one:
        monkeypatch.setattr(link, "bundle", lambda: foreign_app(tmp_path / "stolen"))
        events: list[dict[str, Any]] = []
        transport = GridTransport(
            lambda: link.open_grid(link.Address("127.0.0.1", one.port)), lambda node: 0, events.append
        )

        def refused() -> bool:
            transport.connected()
            transport.receive()
            return any("not everfed's" in str(event.get("reason")) for event in events)

        until(refused)
        transport.close()
        assert not (tmp_path / "stolen").exists()
        assert "refused: run" in (one.sites[0].folder / "supernode.log").read_text()


def test_a_port_that_another_user_bound_first_is_not_taken_for_a_superlink(tmp_path: Path) -> None:
    from everfed.federation.superlink import LinkError, Settings, running

    with socket.create_server(("127.0.0.1", 0)) as impostor:
        settings = Settings("127.0.0.1", impostor.getsockname()[1], tmp_path / "link")
        with pytest.raises(LinkError, match="no SuperLink that you started"), running(settings, lambda line: None):
            pass
