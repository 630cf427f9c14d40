"""Networks of other libraries, weights from files, and what frozen parameters cost: nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import everfed
from everfed import models
from everfed.core.layout import Layout
from everfed.models.pretrained import FrozenBatchNorm, HuggingFace, frozen_digest
from everfed.store.run import RunError
from everfed.streams import from_arrays

SHAPE, CLASSES = (3, 8, 8), 4
TINY_VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 3, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 32, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip


class Net(nn.Module):
    """A body with BatchNorm, and a head."""

    def __init__(self, input_shape: tuple[int, ...] = SHAPE, classes: int = CLASSES) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(input_shape[0], 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(5 * 36, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def build(kind: Any, **options: Any) -> nn.Module:
    return models.build(kind, SHAPE, CLASSES, 0, options)


def images(count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.arange(count) % CLASSES
    return (rng.integers(0, 100, (count, *SHAPE)) + 35 * y[:, None, None, None]).astype(np.uint8), y


def stream(**options: Any) -> everfed.method.Stream:
    x, y = images()
    settings = {"scenario": "class-incremental", "tasks": 2, "clients": 2, "rounds_per_task": 2, **options}
    return from_arrays(x[:40], y[:40], x[40:], y[40:], **settings)


def recipe(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    table = {"model": model, "method": {"name": "fedavg"}, "engine": {"kind": "eager", "device": "cpu"}}
    return {**table, "train": {"batch_size": 8, "optimizer": {"lr": 0.05}}, **sections}


# what trains ----------------------------------------------------------------------------------------------------------
def test_patterns_choose_what_trains() -> None:
    module = build(Net(), trainable=["head.*", "body.0.bias"])
    assert [n for n, p in module.named_parameters() if p.requires_grad] == ["body.0.bias", "head.weight", "head.bias"]
    layout = Layout.of(module)
    assert layout.size == 5 + 180 * 4 + 4
    assert layout.stats == () and layout.counters == ()  # the norm's statistics are constants


@pytest.mark.parametrize("patterns", [["hed.*"], [], "head.*", [3]])
def test_patterns_that_choose_nothing_are_refused(patterns: Any) -> None:
    with pytest.raises(models.ModelError, match="model.trainable"):
        build(Net(), trainable=patterns)


def test_a_frozen_norm_gives_what_it_gives_in_eval_mode_and_never_changes() -> None:
    net = Net()
    net.train()(torch.randn(16, *SHAPE) * 3 + 1)  # statistics that are not 0 and 1
    expected = net.eval()(torch.ones(2, *SHAPE))
    frozen = build(net, trainable=["head.*"]).train()
    assert torch.equal(frozen(torch.ones(2, *SHAPE)), expected)
    assert torch.equal(frozen(torch.ones(2, *SHAPE)), expected)
    assert isinstance(frozen.body[1], FrozenBatchNorm)  # type: ignore[index]
    assert sorted(frozen.state_dict()) == sorted(k for k in net.state_dict() if "tracked" not in k)


def test_a_norm_that_trains_keeps_its_statistics() -> None:
    assert [e.name for e in Layout.of(build(Net(), trainable=["body.1.*", "head.*"])).stats] == [
        "body.1.running_mean",
        "body.1.running_var",
    ]
    own = Net()
    own.body.requires_grad_(False)  # frozen by its author, without model.trainable
    assert Layout.of(build(own)).stats == ()


def test_buffers_outside_of_the_state_are_constants() -> None:
    net = Net()
    net.register_buffer("positions", torch.arange(4), persistent=False)
    net.register_buffer("scale", torch.ones(3), persistent=False)
    layout = Layout.of(net)
    assert [e.name for e in layout.counters] == ["body.1.num_batches_tracked"] and len(layout.stats) == 2


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Wide(Net):
    """14,000 parameters, 724 of them in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(100, 130)


def test_frozen_parameters_are_not_sent_not_kept_by_clients_and_not_checkpointed(tmp_path: Path) -> None:
    """Only the head's 724 numbers travel; the clients keep momentum for these alone."""
    optimizer = {"lr": 0.05, "momentum": 0.9, "state": "kept"}
    net = Wide()
    table = recipe({"kind": net, "trainable": ["head.*"]}, train={"batch_size": 8, "optimizer": optimizer})
    result = everfed.run(table, tmp_path / "run", stream=stream(), checkpoint_every=0.0)
    head, cost = 4 * (180 * 4 + 4), result.data["cost"]
    assert cost["bytes_up"] == cost["bytes_down"] == head * 2 * 4  # two clients, four rounds
    assert cost["client_state_bytes"] == 2 * head
    frozen = 4 * sum(p.numel() for n, p in net.named_parameters() if not n.startswith("head"))
    assert frozen > 50_000
    assert folder_bytes(tmp_path / "run" / "checkpoint") < 2 * (head + 8_000) < frozen
    assert folder_bytes(tmp_path / "run" / "clients") < 2 * 2 * (head + 1_000) < frozen
    assert result.data["frozen_sha256"] == frozen_digest(build(net, trainable=["head.*"]))


# an nn.Module itself ----------------------------------------------------------------------------------------------
def test_a_network_itself_is_trained_from_its_weights(tmp_path: Path) -> None:
    net = Net()
    with torch.no_grad():
        net.head.bias.fill_(7.0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    still = recipe({"kind": net}, train={"rounds_per_task": 2, "optimizer": {"lr": 0.0}})
    everfed.run(still, tmp_path / "run", stream=stream())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    loaded = everfed.load(tmp_path / "run", model=Net()).model
    assert torch.equal(loaded.head.bias, before["head.bias"])  # type: ignore[union-attr]
    with pytest.raises(everfed.UserError, match="model=..."):
        everfed.load(tmp_path / "run")


def test_a_run_of_a_network_goes_on_with_the_same_network_only(tmp_path: Path) -> None:
    net, made = Net(), stream()
    stop = {"rounds": 0}

    def interrupt(event: dict[str, Any]) -> None:
        stop["rounds"] += event["event"] == "checkpoint"
        if stop["rounds"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        everfed.run(recipe({"kind": net}), tmp_path / "run", stream=made, observers=[interrupt], checkpoint_every=0.0)
    with pytest.raises(RunError, match="network made in Python"):
        everfed.resume(tmp_path / "run", stream=made, model=Net())
    resumed = everfed.resume(tmp_path / "run", stream=made, model=net)
    whole = everfed.run(recipe({"kind": net}), tmp_path / "whole", stream=made)
    assert resumed.data["accuracy_matrix"] == whole.data["accuracy_matrix"]
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


# weights from files ---------------------------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Net]:
    torch.manual_seed(3)
    net = Net(classes=9)
    safetensors.torch.save_file(net.state_dict(), tmp_path / "model.safetensors")
    return tmp_path, net


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_weights_come_from_a_file_or_its_folder_and_a_head_of_other_classes_stays_new(
    saved: tuple[Path, Net], name: str
) -> None:
    folder, net = saved
    made = models.build(f"{__name__}:Net", SHAPE, CLASSES, 0, {"weights": str(folder / name)})
    assert torch.equal(made.body[0].weight, net.body[0].weight)  # type: ignore[index, union-attr]
    assert made.head.weight.shape == (CLASSES, 180)  # type: ignore[union-attr]
    below = models.build(f"{__name__}:Net", SHAPE, 9, 0, {"weights": folder.name}, data_folder=folder.parent)
    assert torch.equal(below.head.weight, net.head.weight)  # type: ignore[union-attr]


def test_weights_of_another_network_are_refused_with_the_names(saved: tuple[Path, Net]) -> None:
    folder, net = saved
    odd = {**net.state_dict(), "body.0.weight": torch.zeros(5, 3, 5, 5), "neck.weight": torch.zeros(1)}
    safetensors.torch.save_file(odd, folder / "odd.safetensors")
    with pytest.raises(models.ModelError, match=r"model.weights.*odd.safetensors.*body.0.weight"):
        build(Net(), weights=str(folder / "odd.safetensors"))
    del odd["body.0.weight"]
    odd["body.0.weight"] = net.state_dict()["body.0.weight"]
    safetensors.torch.save_file(odd, folder / "odd.safetensors")
    with pytest.raises(models.ModelError, match="neck.weight"):
        build(Net(), weights=str(folder / "odd.safetensors"))


def test_a_head_with_an_unusual_name_may_be_named(saved: tuple[Path, Net]) -> None:
    class Odd(Net):
        def __init__(self, classes: int) -> None:
            super().__init__()
            del self.head
            self._fc = nn.Linear(5 * 36, classes)

    folder, _ = saved
    safetensors.torch.save_file(Odd(9).state_dict(), folder / "odd.safetensors")
    weights = {"weights": str(folder / "odd.safetensors")}
    with pytest.raises(models.ModelError, match=r'_fc.weight, _fc.bias; .*unusual name: model.head = "_fc"'):
        build(Odd(CLASSES), **weights)
    assert build(Odd(CLASSES), **weights, head="_fc")._fc.out_features == CLASSES  # type: ignore[union-attr]
    with pytest.raises(models.ModelError, match="model.head must name the last layer"):
        build(Odd(CLASSES), **weights, head=3)


def test_pickles_and_missing_files_are_refused(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(models.ModelError, match="not a safetensors file"):
        build(Net(), weights=str(tmp_path / "weights.pt"))
    with pytest.raises(models.ModelError, match=r"looked for .*nowhere.*data/nowhere.*https://huggingface.co/nowhere"):
        models.build(Net(), SHAPE, CLASSES, 0, {"weights": "nowhere"}, data_folder=tmp_path / "data")


def test_a_resumed_run_with_other_frozen_weights_is_refused(saved: tuple[Path, Net], tmp_path: Path) -> None:
    """The digest of the frozen weights is part of the run's identity."""
    folder, net = saved
    model = {"kind": f"{__name__}:Net", "weights": str(folder / "model.safetensors"), "trainable": ["head.*"]}

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        everfed.run(recipe(model), tmp_path / "run", stream=stream(), observers=[stop], checkpoint_every=0.0)
    changed = {**net.state_dict(), "body.0.bias": net.body[0].bias.detach() + 1e-6}  # type: ignore[operator]
    safetensors.torch.save_file(changed, folder / "model.safetensors")
    with pytest.raises(everfed.UserError, match="another recipe|checkpoint"):
        everfed.resume(tmp_path / "run", stream=stream())


# transformers and timm ------------------------------------------------------------------------------------------------
@pytest.fixture
def vit(tmp_path: Path) -> Path:
    pytest.importorskip("transformers", reason="the extra `text` is not installed")
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit/config.json").write_text(json.dumps(TINY_VIT))
    return tmp_path / "vit"


def test_a_hugging_face_folder_gives_logits(vit: Path) -> None:
    made = build(f"hf:{vit}")
    assert made(torch.zeros(2, *SHAPE)).shape == (2, CLASSES)
    assert torch.equal(made.eval()(torch.ones(2, *SHAPE)), build(f"hf:{vit}").eval()(torch.ones(2, *SHAPE)))
    assert Layout.of(made).stats == () and Layout.of(made).counters == ()


def test_a_hugging_face_folder_with_weights(vit: Path) -> None:
    first = models.build(f"hf:{vit}", SHAPE, 7, 1)
    first.base.save_pretrained(vit)  # type: ignore[union-attr, operator]
    again = build(f"hf:{vit}")
    own, saved = again.state_dict(), first.state_dict()
    same = [name for name in own if own[name].shape == saved[name].shape]
    assert len(same) == len(own) - 2 and all(torch.equal(own[name], saved[name]) for name in same)
    assert own["base.classifier.weight"].shape == (CLASSES, 16)


def tiny_bert(**changes: Any) -> Any:
    """A classifier of texts whose padding is token 0."""
    transformers = pytest.importorskip("transformers", reason="the extra `text` is not installed")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=40, num_labels=CLASSES, max_position_embeddings=16, **sizes, **changes)
    return transformers.BertForSequenceClassification(config).eval()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_model_file_loads_no_kernels_from_the_network(key: str) -> None:
    """With the package `kernels` installed, transformers fetches and runs what a configuration names."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = {"model_type": "vit", **sizes, "image_size": 8, "patch_size": 4, "num_channels": 3, key: "someone/kernel"}
    made = models.build("hf:any", (3, 8, 8), 5, 0, rebuilding={"config": config})
    assert "someone" not in str(made.base.config.to_dict()) and made.base.config._attn_implementation == "sdpa"


def test_padding_does_not_change_what_a_text_model_says() -> None:
    made = HuggingFace(tiny_bert())
    texts = torch.tensor([[5, 6, 7], [8, 9, 3]])
    padded = torch.cat([texts, torch.zeros(2, 5, dtype=torch.int64)], 1)
    torch.testing.assert_close(made(padded), made(texts))
    assert made(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()  # a text without a word
    assert not torch.allclose(HuggingFace(tiny_bert(pad_token_id=None))(padded), made(texts))


@pytest.mark.parametrize("method", ["ewc", "gss-greedy"])
def test_methods_with_gradients_of_single_samples_run_on_padded_texts(method: str, tmp_path: Path) -> None:
    """Their mask makes transformers branch on data."""
    tokens = np.zeros((24, 6), np.int64)
    tokens[:, :3] = np.random.default_rng(0).integers(5, 40, (24, 3))
    arrays = (tokens[:16], np.arange(16) % 4, tokens[16:], np.arange(8) % 4)
    texts = from_arrays(*arrays, scenario="class-incremental", tasks=2, clients=2, rounds_per_task=1, participation=1.0)
    settings = {"name": "texts", "method": {"name": method}, "train": {"rounds_per_task": 1}}
    result = everfed.run({**settings, "model": {"kind": tiny_bert()}}, tmp_path / "run", stream=texts, progress=False)
    assert result.metrics["acc"] is not None


def test_an_object_without_a_head_is_refused_with_the_remedy() -> None:
    made = build(tiny_bert().bert)
    with pytest.raises(ValueError, match=r"BertModel gives no logits.*ForSequenceClassification"):
        made(torch.ones(2, 4, dtype=torch.int64))


def test_adapters_of_peft_train_as_they_come(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra `peft` is not installed")
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    made = build(peft.get_peft_model(tiny_bert(), config))
    assert made(torch.ones(2, 4, dtype=torch.int64)).shape == (2, CLASSES)
    assert {entry.name.split(".")[-2] for entry in Layout.of(made).params} == {"default"}


def test_a_hugging_face_folder_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `text` is not installed")
    with pytest.raises(models.ModelError, match=r"model.kind = 'none'.*config.json"):
        models.build("hf:none", SHAPE, CLASSES, 0, data_folder=tmp_path)


def test_timm_is_asked_for_the_network_without_downloading(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def create_model(name: str, **options: Any) -> nn.Module:
        asked.update(options, name=name)
        return Net()

    found = SimpleNamespace(fixed_input_size=True)
    fake = SimpleNamespace(
        is_model=bool, create_model=create_model, models=SimpleNamespace(get_pretrained_cfg=lambda name: found)
    )
    monkeypatch.setitem(sys.modules, "timm", fake)  # type: ignore[arg-type]
    build("timm:vit_tiny_patch16_224", depth=2, trainable=["head.*"])
    expected = {"name": "vit_tiny_patch16_224", "pretrained": False, "num_classes": 4, "in_chans": 3}
    assert asked == {**expected, "img_size": 8, "depth": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"pretrained": True},
        {"pretrained": True, "pretrained_cfg": {"url": "file:///etc/hostname"}, "cache_dir": "somewhere"},
        {"checkpoint_path": "/etc/hostname"},
        {"pretrained_cfg_overlay": {"file": "/etc/hostname"}},
        {"depth": {"url": "http://localhost"}},
        {"drop_rate": "0.1"},
        {"act_layer": ("relu",)},
        {"nonsense": 3},
    ],
)
def test_a_recipe_cannot_make_timm_fetch_or_write_files(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `pretrained_cfg` and `cache_dir` timm writes a file of a server's choice into a folder of its choice."""
    asked: list[Any] = []
    fake = SimpleNamespace(
        is_model=bool,
        create_model=lambda *args, **more: asked.append(more) or Net(),
        models=SimpleNamespace(get_pretrained_cfg=lambda name: None),
    )
    monkeypatch.setitem(sys.modules, "timm", fake)  # type: ignore[arg-type]
    with pytest.raises(models.ModelError, match=f"model.{next(iter(options))} = .* is not passed on to 'timm:vit"):
        build("timm:vit_tiny_patch16_224", **options)
    assert asked == []


def test_a_torchvision_of_another_torch_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(models.ModelError, match=r"made for the torch .*nms does not exist.*everfed\[vision\]"):
        build("timm:vit_tiny_patch16_224")


def test_timm_itself() -> None:
    pytest.importorskip("timm", reason="needs timm and torchvision", exc_type=ImportError)
    made = build("timm:vit_tiny_patch16_224", depth=1, embed_dim=12, num_heads=2, patch_size=4)
    assert made(torch.zeros(2, *SHAPE)).shape == (2, CLASSES)
    with pytest.raises(models.ModelError, match=r"no such network. Did you mean .*vit_tiny_patch16_224"):
        build("timm:vit_tinny_patch16_224")
    with pytest.raises(models.ModelError, match="cannot be built from its options"):
        build("timm:vit_tiny_patch16_224", cardinality=3)


def test_an_unknown_kind_names_what_is_allowed() -> None:
    with pytest.raises(models.ModelError, match="timm:NAME, hf:FOLDER, wheel:NAME or package.module:Name"):
        build("vitt")
