"""A client whose frozen weights are not the server's refuses: no message would ever correct them."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from everfed import models
from everfed.federation import request as ask
from everfed.federation.client import Identity, RealClient
from everfed.federation.packet import Packet, digest
from everfed.federation.request import Answer, Request, Step
from everfed.federation.runtime import RuntimeBuilder
from everfed.federation.serving import _with_frozen
from everfed.recipe import Recipe, from_table, to_toml
from everfed.session import assemble


class Body(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(64, 10)
        self.head = nn.Linear(10, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x.flatten(1))))  # type: ignore[no-any-return]


def recipe() -> Recipe:
    model = {"kind": f"{__name__}:Body", "weights": "body.safetensors", "trainable": ["head.*"]}
    stream = {"dataset": "digits", "tasks": 1, "clients": 2}
    return from_table({"stream": stream, "model": model, "method": {"name": "fedavg"}, "train": {"rounds_per_task": 1}})


def weights(folder: Path, shift: float) -> str:
    torch.manual_seed(0)
    net = Body((1, 8, 8), 10)
    folder.mkdir()
    shifted = {**net.state_dict(), "body.bias": net.body.bias.detach() + shift}
    safetensors.torch.save_file(shifted, folder / "body.safetensors")
    return str(folder)


def answered(text: bytes, folder: Path, data_dir: str) -> Answer:
    site = RealClient(folder, Identity("site-0", 0), RuntimeBuilder(data_dir=data_dir))
    made = Request("a1", 1, 0, digest(text), 1.0, (0, 0, 0, 0), (Step("train", (0, 0, 0, 0), 0, "", ()),))
    return Answer.of(site.answer(Packet(made.header(), {ask.RECIPE: text})))


def test_a_client_with_other_frozen_weights_refuses(tmp_path: Path) -> None:
    server = assemble(recipe(), weights(tmp_path / "server", 0.0))
    assert len(server.frozen) == 64
    text = to_toml(_with_frozen(recipe(), server.frozen)).encode()
    same = answered(text, tmp_path / "a", weights(tmp_path / "same", 0.0))
    other = answered(text, tmp_path / "b", weights(tmp_path / "other", 1e-6))
    assert other.kind == ask.REFUSED and "frozen_sha256" in other.reason
    assert same.kind != ask.REFUSED


def test_a_recipe_without_frozen_weights_is_sent_as_it_is() -> None:
    assert _with_frozen(recipe(), "") == recipe()
    assert models.frozen_digest(Body((1, 8, 8), 3)) == ""
