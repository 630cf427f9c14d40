"""Ideal (Oracle): in task t a client trains on all its data of tasks 1..t. An upper bound."""

from __future__ import annotations

from dataclasses import dataclass

from everfed.method import HISTORY, Client, Data, Part


@dataclass(frozen=True)
class Ideal(Part):
    name = "ideal"

    def needs(self):
        return {HISTORY}

    def receive(self, client: Client) -> None:
        earlier = client.history()
        if earlier:
            client.data = Data.union([*earlier, client.data])
