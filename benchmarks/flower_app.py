"""The CPU cases as an app for Flower's simulation, written as its tutorials write one. Needs torch and flwr only.

The case is named by the environment variable FLOWER_CASE, since Flower builds the app anew in every worker. Data, model
and one thread per worker are the same as in everfed's runs, and data is made once per worker, as there.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional

CLIENTS = 10
LR = 0.01
BATCH = 32
CASES = {"mcmahan": ((1, 28, 28), 600, 1), "demo": ((1, 8, 8), 144, 5)}  # shape, images per client, epochs


def case() -> str:
    return os.environ["FLOWER_CASE"]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    if case() == "demo":
        hidden = (nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(100, 10))
    first = (nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10))


@lru_cache(maxsize=CLIENTS)
def data(partition: int) -> tuple[Tensor, Tensor]:
    """Random uint8 images, and labels in turn."""
    shape, count, _ = CASES[case()]
    generator = torch.Generator().manual_seed(partition)
    return torch.randint(256, (count, *shape), dtype=torch.uint8, generator=generator), torch.arange(count) % 10


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Local SGD, as in the bare loop."""
    torch.set_num_threads(1)
    model = build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = data(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(CASES[case()][2]):
        order = torch.randperm(len(y))
        for start in range(0, len(y), BATCH):
            rows = order[start : start + BATCH]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x[rows].float().div_(255.0)), y[rows])
            loss.backward()
            optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=message)
