"""The ServerApp: carries packets between Flower's Grid and the server of its run, `everfed serve`.

With `flwr run` and a recipe in the run's config the server is the ServerApp itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from everfed.federation import packet as wire
from everfed.federation.flower.replies import OneByOne
from everfed.federation.local import connected, run_socket
from everfed.federation.packet import Packet
from everfed.federation.transport import Connection, Failure

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Serve the recipe of the config, or carry packets for the process that waits for this run."""
    if context.run_config.get("recipe"):
        _serve(grid, context)
    else:
        carry(OneByOne(grid), str(run_socket(context.run_id)))


def carry(connection: Connection, path: str) -> None:
    """Do what the server at the unix socket `path` requests, until it closes the connection."""
    with connected(path) as server:
        while True:
            try:
                request = wire.receive(server)
            except (EOFError, OSError):
                connection.close()
                return
            for packet in _done(connection, request):
                wire.send(server, packet)


def _done(connection: Connection, request: Packet) -> Iterator[Packet]:
    call = request.text("call")
    if call == "nodes":
        nodes = [(str(node.id), node.since, node.key.decode("latin-1")) for node in connection.get_nodes()]
        yield Packet({"nodes": json.dumps(nodes)})
    elif call == "push":
        packet = Packet(request.json("header"), request.pieces)
        yield Packet({"ticket": connection.push(int(request.text("node")), packet, request.text("kind"))})
    elif call == "pull":
        found = connection.pull(request.json("tickets"))
        yield Packet({"count": len(found)})
        for ticket, answer in found:
            if isinstance(answer, Failure):
                yield Packet({"ticket": ticket, "failure": answer.reason, "own": answer.own})
            else:
                yield Packet({"ticket": ticket, "header": json.dumps(answer.header)}, answer.pieces)
    elif call == "wait":
        connection.wait(float(request.header["seconds"]))
        yield Packet({})
    else:
        connection.forget(request.json("tickets"))
        yield Packet({})


def _serve(grid: Grid, context: Context) -> None:
    from everfed import api
    from everfed.federation.serving import Serving, serve
    from everfed.recipe import read

    config = context.run_config
    recipe = read(str(config["recipe"]))
    folder = Path(str(config["out"])) if config.get("out") else api.default_folder(recipe)
    data_dir = str(config["data-dir"]) or None
    every = float(config["checkpoint-every"])
    serve(Serving(recipe, folder, data_dir, float(config["scale"]), checkpoint_every=every), lambda: OneByOne(grid))
