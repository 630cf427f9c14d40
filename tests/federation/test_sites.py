"""Clients with data of their own, and a federation with TLS and keys, in real processes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from everfed.federation.certificates import make_authority, make_client, make_server
from everfed.federation.client import STEP_FAILED
from everfed.federation.joining import Joining
from everfed.federation.security import enrolled, read_security
from everfed.federation.superlink import Settings, running
from everfed.recipe import from_table, read
from tests.federation.field import Field, Site, events, outcome, simulated, small_recipe, until
from tests.support.ports import free_port

flwr = pytest.importorskip("flwr", reason="the extra `flower` is not installed")
pytestmark = [pytest.mark.federation, pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "federation"
MODULE = """\
import my_site, os


def make_stream(client):
    os.environ["SITE_DATA"] = os.path.join({data!r}, str(client))
    return my_site.make_stream(client)
"""


def write_data(folder: Path) -> None:
    """Two sites with two periods each, the second upside down."""
    x, y = load_digits(return_X_y=True)
    images = (x * 15).astype("uint8").reshape(-1, 8, 8)
    for site in range(2):
        (folder / str(site)).mkdir(parents=True)
        for period in range(2):
            rows = slice((2 * site + period) * 60, (2 * site + period + 1) * 60)
            np.savez(folder / str(site) / f"{period}.npz", x=images[rows][:, :: -1 if period else 1], y=y[rows])


def test_two_sites_with_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documentation's example. The server has no data; a simulation that sees both folders gives the same bits."""
    write_data(tmp_path / "data")
    (tmp_path / "sites_for_test.py").write_text(MODULE.format(data=str(tmp_path / "data")))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    path = os.pathsep.join([str(tmp_path), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    recipe = read(EXAMPLES / "recipe.toml", sets=["train.rounds_per_task=1", "engine.kind=eager"])
    field = Field(tmp_path, 0)
    try:
        for client in range(2):
            joining = field.joining(client, data="sites_for_test:make_stream")
            field.sites[client] = Site(joining, env={"PYTHONPATH": path})
        out = field.serve(recipe, "run")
    finally:
        field.close()
    (kept,) = (tmp_path / "c0").glob("*/recipe.toml")
    assert kept.read_bytes() == (out / "sent.toml").read_bytes(), "what a client may agree to by its digest"
    table = recipe.model_dump(exclude_none=True)
    table["stream"]["dataset"] = "sites_for_test:make_stream"
    # the files differ in the recipe's hash, for each names its own data
    reference = simulated(from_table(table), tmp_path / "reference")
    models = [load_file(folder / "model.safetensors") for folder in (out, reference)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(values, models[1][name]) for name, values in models[0].items())
    assert outcome(out)["matrix"] == outcome(tmp_path / "reference")["matrix"]


BROKEN = """\
def make_stream(client):
    class NoCamera(Exception):
        pass

    raise NoCamera("the camera is not plugged in")
"""


def test_a_site_whose_own_code_always_raises(tmp_path: Path) -> None:
    """The others go on without it after its tries, and the events, the status and its own log say why."""
    from everfed.federation.status import status

    write_data(tmp_path / "data")
    (tmp_path / "sites_for_test.py").write_text(MODULE.format(data=str(tmp_path / "data")))
    (tmp_path / "broken_for_test.py").write_text(BROKEN)
    path = os.pathsep.join([str(tmp_path), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    sets = ["train.rounds_per_task=1", "engine.kind=eager", "federation.tries=2", "federation.retry=0.1"]
    recipe = read(EXAMPLES / "recipe.toml", sets=sets)
    field = Field(tmp_path, 0)
    try:
        for client, module in enumerate(("sites_for_test", "broken_for_test")):
            joining = field.joining(client, data=f"{module}:make_stream")
            field.sites[client] = Site(joining, env={"PYTHONPATH": path})
        out = field.serve(recipe, "run")
    finally:
        field.close()
    absent = [event["absent"] for event in events(out, "phase") if "absent" in event]
    assert absent and all(set(one) == {"1"} for one in absent)
    assert absent[0]["1"] == f"failed: given up after 2 tries: {STEP_FAILED}"
    clients = status(out)["clients"]
    assert [one["name"] for one in clients if STEP_FAILED in one["trouble"]] == ["site-1"]
    assert "NoCamera: the camera is not plugged in" in (tmp_path / "c1" / "worker.log").read_text()


def test_tls_and_keys(tmp_path: Path) -> None:
    """Two clients are enrolled; a third has a key that nobody enrolled, and is refused while the run goes on."""
    from everfed.federation.flower.link import Address, open_grid, register
    from everfed.federation.serving import Serving, serve

    pki = tmp_path / "pki"
    make_authority(pki)
    make_server(pki, ["localhost"])
    keys = [make_client(pki, f"site-{client}") for client in range(2)]
    make_authority(tmp_path / "other")
    stranger = make_client(tmp_path / "other", "site-2")
    recipe, security, port = small_recipe(tmp_path, 2, method="fedgp+der"), read_security(pki), free_port()
    address = Address("127.0.0.1", port)
    sites: list[Site] = []
    with running(Settings("127.0.0.1", port, tmp_path / "link", security), lambda line: None):
        register(address, enrolled(pki))
        register(address, enrolled(pki))  # those it knows already are fine
        try:
            for client, key in enumerate([*keys, stranger]):
                folder = tmp_path / f"c{client}"
                wanted = client if client < 2 else -1
                joining = Joining(
                    f"localhost:{port}", folder, f"site-{client}", wanted, root=security.ca, key=key, poll=0.3
                )
                sites.append(Site(joining))
            serving = Serving(recipe, tmp_path / "run", keys=enrolled(pki), checkpoint_every=0.0)
            serve(serving, lambda: open_grid(address))
            until(lambda: any("the supernode ended" in line for line in sites[2].said))
        finally:
            for site in sites:
                site.close()
    assert outcome(tmp_path / "run") == outcome(simulated(recipe, tmp_path / "reference"))
    assert {event["reason"] for event in events(tmp_path / "run", "client")} == {"site-0", "site-1"}
