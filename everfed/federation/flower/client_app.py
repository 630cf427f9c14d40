"""The ClientApp: passes each message to the worker on this machine and returns its answer.

Imports neither torch nor methods, since Flower starts a process for every message. The SuperNode's configuration names
the worker's socket: --node-config 'everfed-socket="/path/worker.sock"'.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from everfed.federation.flower.records import from_records, to_records
from everfed.federation.local import NODE_KEY, call_worker

app = ClientApp()


@app.train()
@app.evaluate()
@app.query()
def forward(message: Message, context: Context) -> Message:
    """Pass any message to the worker."""
    path = context.node_config.get(NODE_KEY)
    if not isinstance(path, str):
        raise ValueError(f"this SuperNode's configuration lacks its worker: --node-config '{NODE_KEY}=\"PATH\"'")
    return Message(to_records(call_worker(path, from_records(message.content))), reply_to=message)
