"""A trained model leaves with all that is needed to use it: network, input form, normalisation, class names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import everfed
from everfed import models
from everfed.api import reassemble
from everfed.session import saved_model
from everfed.session.export import export
from everfed.store.run import RunFolder
from everfed.streams import from_arrays
from tests.support.toy import small_memory

SHAPE, CLASSES = (3, 8, 8), 4
NAMES = ("ash", "birch", "cedar", "date")
TINY_VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 3, "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
NORMALISE = {"mean": [0.5, 0.25, 0.125], "std": [0.5, 0.25, 2.0]}


class Net(nn.Sequential):
    def __init__(self, input_shape: tuple[int, ...] = SHAPE, classes: int = CLASSES, width: int = 6) -> None:
        super().__init__(
            nn.Conv2d(input_shape[0], width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width * 36, classes)
        )
        self[0].weight.detach().numpy()  # as of a network that computes with its first weights


def write_data(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    y = np.arange(80) % CLASSES
    x = (rng.integers(0, 60, (80, 8, 8, 3)) + 60 * y[:, None, None, None]).astype(np.uint8)
    arrays = {"x_train": x[:60], "y_train": y[:60], "x_test": x[60:], "y_test": y[60:]}
    np.savez(folder / "trees.npz", **arrays, names=np.array(NAMES))
    return folder / "trees.npz"


def recipe(data: Path, kind: str = f"{__name__}:Net", **sections: Any) -> dict[str, Any]:
    stream = {"dataset": str(data), "scenario": "class-incremental", "tasks": 2, "clients": 2, "normalise": NORMALISE}
    table = {"stream": stream, "model": {"kind": kind}, "method": {"name": "fedavg"}, "engine": {"kind": "eager"}}
    return {**table, "train": {"rounds_per_task": 2, "optimizer": {"lr": 0.02}}, **sections}


def load(folder: Path, **options: Any) -> everfed.api.LoadedRun:
    """The networks of this file are code that the folder names."""
    return everfed.load(folder, allow_code=[__name__], **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose data is gone."""
    folder = tmp_path_factory.mktemp("saved_model")
    data = write_data(folder)
    everfed.run(recipe(data, model={"kind": f"{__name__}:Net", "width": 5}), folder / "run")
    data.rename(folder / "gone.npz")
    return folder / "run"


def test_the_file_describes_itself(run: Path) -> None:
    found = saved_model.read_description(run / "model.safetensors")
    assert found is not None
    assert (found.kind, found.options) == (f"{__name__}:Net", {"width": 5})
    assert (found.input_shape, found.classes, found.class_names) == (SHAPE, CLASSES, NAMES)
    assert (found.dtype, found.mean, found.std) == ("uint8", (0.5, 0.25, 0.125), (0.5, 0.25, 2.0))
    assert len(found.recipe) == 32


def test_a_run_is_loaded_without_its_data(run: Path) -> None:
    loaded = load(run)
    tensors = safetensors.torch.load_file(run / "model.safetensors")
    assert not loaded.model.training and loaded.class_names == NAMES
    assert all(torch.equal(value, tensors[name]) for name, value in loaded.model.state_dict().items())


def test_predictions_use_the_run_s_own_normalisation(run: Path) -> None:
    """(x / 255 - mean) / std by hand, and every usual layout of the same images."""
    loaded = load(run)
    images = np.load(run.parent / "gone.npz")["x_test"]
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(NORMALISE[key]).reshape(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        expected = loaded.model((x - mean) / std)
    torch.testing.assert_close(loaded.outputs(images), expected, rtol=1e-5, atol=1e-5)
    assert loaded.predict(images).tolist() == expected.argmax(1).tolist()
    for same in (images.transpose(0, 3, 1, 2), torch.from_numpy(images), list(images)):
        assert np.array_equal(loaded.predict(same, batch_size=7), loaded.predict(images))


def test_images_of_another_size_are_resized(run: Path) -> None:
    loaded = load(run)
    flat = np.full((2, 8, 8, 3), 90, dtype=np.uint8)
    large = np.full((2, 20, 24, 3), 90, dtype=np.uint8)
    assert torch.equal(loaded.outputs(large), loaded.outputs(flat))


@pytest.mark.parametrize("wrong", [np.zeros((2, 8, 8, 3), np.float32), np.zeros((2, 8, 8, 4), np.uint8)])
def test_samples_of_another_form_are_refused(run: Path, wrong: np.ndarray) -> None:
    with pytest.raises((everfed.UserError, ValueError), match="predict|channels"):
        load(run).predict(wrong)


def test_pictures_of_several_sizes_and_modes_in_one_list(run: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the extra `images` is not installed")
    red = image.new("RGB", (8, 8), (200, 0, 0))
    given = [red, red.resize((20, 13)), red.convert("P"), red.convert("RGBA"), red.convert("L"), np.asarray(red)]
    loaded = load(run)
    outputs = loaded.outputs(given)
    assert outputs.shape == (6, CLASSES) and loaded.outputs([]).shape == (0, CLASSES)
    for place in (1, 3, 5):
        torch.testing.assert_close(outputs[place], outputs[0])
    assert not torch.equal(outputs[4], outputs[0])
    with pytest.raises(everfed.UserError, match="mode 'F' has more than 8 bits"):
        loaded.predict([red.convert("F")])
    with pytest.raises(everfed.UserError, match="images with 4 channels cannot be given 3"):
        loaded.predict(np.zeros((1, 8, 8, 4), np.uint8))


def test_a_hugging_face_network_is_loaded_without_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `text` is not installed")
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit/config.json").write_text(json.dumps(TINY_VIT))
    everfed.run(recipe(write_data(tmp_path), kind=f"hf:{tmp_path / 'vit'}"), tmp_path / "run")
    shutil.rmtree(tmp_path / "vit")
    loaded = load(tmp_path / "run")
    assert loaded.predict(np.zeros((3, 8, 8, 3), np.uint8)).shape == (3,)
    tensors = safetensors.torch.load_file(tmp_path / "run/model.safetensors")
    assert all(torch.equal(value, tensors[name]) for name, value in loaded.model.state_dict().items())


def test_weights_are_not_read_again(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(Net().state_dict(), weights)
    model = {"kind": f"{__name__}:Net", "weights": str(weights), "trainable": ["3.*"]}
    everfed.run(recipe(write_data(tmp_path), model=model), tmp_path / "run")
    weights.unlink()
    assert load(tmp_path / "run").predict(np.zeros((1, 8, 8, 3), np.uint8)).shape == (1,)


def test_what_a_config_beside_the_weights_says_is_kept(tmp_path: Path) -> None:
    """The epsilon of layer norms, large enough to be seen in every output."""
    sizes = {"patch": 4, "width": 8, "depth": 1, "heads": 2}
    (tmp_path / "vit").mkdir()
    tensors = models.build("vit", SHAPE, CLASSES, 1, sizes).state_dict()
    safetensors.torch.save_file(tensors, tmp_path / "vit/model.safetensors")
    (tmp_path / "vit/config.json").write_text('{"layer_norm_eps": 0.5}')
    model = {"kind": "vit", **sizes, "weights": str(tmp_path / "vit")}
    everfed.run(recipe(write_data(tmp_path), model=model), tmp_path / "run")
    network = load(tmp_path / "run").model
    assert {layer.eps for layer in network.modules() if isinstance(layer, nn.LayerNorm)} == {0.5}


def test_a_network_with_low_rank_factors_is_loaded(tmp_path: Path) -> None:
    model = {"kind": "vit", "patch": 4, "width": 16, "depth": 1, "heads": 2, "lora": {"rank": 2}}
    result = everfed.run(recipe(write_data(tmp_path), model=model), tmp_path / "run")
    tensors = safetensors.torch.load_file(tmp_path / "run/model.safetensors")
    loaded = load(tmp_path / "run").model.state_dict()
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in loaded)
    assert len(result.data["frozen_sha256"]) == 64


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 2},
    "lorm": {"rank": 2},
    "pilora": {"rank": 2},
    "prompt-l2p": {"pool": 4, "top": 2},
    "prompt-dual": {"general": [0], "expert": []},
    "prompt-coda": {"components": 2, "blocks": [0]},
    "fed-cprompt": {"components": 2, "blocks": [0], "near": 1.0},
}


@pytest.mark.parametrize("method", ADAPTERS)
def test_a_network_that_a_method_adapted_is_loaded(method: str, tmp_path: Path) -> None:
    """Its outputs are those of the network that was trained, bit for bit."""
    model = {"kind": "vit", "patch": 4, "width": 16, "depth": 1, "heads": 2}
    data = write_data(tmp_path)
    everfed.run(recipe(data, model=model, method={"name": method, method: ADAPTERS[method]}), tmp_path / "run")
    trained = reassemble(RunFolder.open(tmp_path / "run"), on_cpu=True).build_module()
    trained.load_state_dict(safetensors.torch.load_file(tmp_path / "run/model.safetensors"))
    data.unlink()
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0))
    assert torch.equal(load(tmp_path / "run").model(x), trained.eval()(x))


@pytest.mark.parametrize("method", ["ridge", "ranpac", "hgp", "ccvr", "regmean", "lora", "prompt-coda", "fedgp+lora"])
def test_predictions_are_those_that_were_scored(method: str, tmp_path: Path) -> None:
    model = {"kind": "vit", "patch": 4, "width": 16, "depth": 1, "heads": 2}
    options = {**small_memory(method), **({method: ADAPTERS[method]} if method in ADAPTERS else {})}
    table = recipe(write_data(tmp_path), model=model, method={"name": method, **options}, eval={"logits": "full"})
    result = everfed.run(table, tmp_path / "run")
    held = np.load(tmp_path / "trees.npz")
    correct = load(tmp_path / "run").predict(held["x_test"]) == held["y_test"]
    tasks = [held["y_test"] < 2, held["y_test"] >= 2]
    assert result.data["accuracy_matrix"][-1] == [correct[task].mean() for task in tasks]


@pytest.mark.parametrize("method", ["fedproto-personal", "fedas", "fedweit"])
def test_a_shared_network_that_lacks_what_clients_keep_predicts_nothing(method: str, tmp_path: Path) -> None:
    options = {"fedas": {"head": "3"}} if method == "fedas" else {}
    everfed.run(recipe(write_data(tmp_path), method={"name": method, **options}), tmp_path / "run")
    loaded = load(tmp_path / "run")
    with pytest.raises(everfed.UserError, match="parameters of its own.*client=0"):
        loaded.predict(np.zeros((1, 8, 8, 3), np.uint8))
    with pytest.raises(everfed.UserError, match="--client 0"):
        export(loaded.model, loaded.description, "torch", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_method_adds_to_the_network_is_loaded_too(tmp_path: Path) -> None:
    everfed.run(recipe(write_data(tmp_path), method={"name": "fedweit"}), tmp_path / "run")
    loaded, tensors = (
        load(tmp_path / "run").model,
        safetensors.torch.load_file(tmp_path / "run/model.safetensors"),
    )
    assert any(name.startswith("extras.") for name in tensors)
    assert all(torch.equal(value, tensors[name]) for name, value in loaded.state_dict().items())


def test_a_stream_with_inputs_of_its_own_leaves_them_to_the_user(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 5)), np.arange(40) % 2
    made = from_arrays(x[:30], y[:30], x[30:], y[30:], scenario="class-incremental", tasks=1, rounds_per_task=1)

    class Squared(type(made)):  # type: ignore[misc]
        def inputs(self, x: Tensor) -> Tensor:
            return x.float() ** 2

    made.__class__ = Squared
    table = {"model": {"kind": "mlp"}, "method": {"name": "fedavg"}}
    everfed.run(table, tmp_path / "run", stream=made)
    with pytest.raises(everfed.UserError, match="a way of its own"):
        load(tmp_path / "run").predict(x)


# personal models ------------------------------------------------------------------------------------------------------
def test_personal_models_are_those_that_were_scored(tmp_path: Path) -> None:
    """fedas: every client has its own head on an aligned base; their accuracies are the matrix's last row."""
    method = {"name": "fedas", "fedas": {"head": "3"}}
    result = everfed.run(recipe(write_data(tmp_path), method=method), tmp_path / "run", checkpoint_every=0.0)
    assert result.data["evaluated"] == "personalised"
    held = np.load(tmp_path / "trees.npz")
    correct = np.zeros((2, 20), dtype=bool)
    for client in range(2):
        correct[client] = load(tmp_path / "run", client=client).predict(held["x_test"]) == held["y_test"]
    tasks = [held["y_test"] < 2, held["y_test"] >= 2]
    assert result.data["accuracy_matrix"][-1] == [correct[:, task].mean() for task in tasks]
    heads = [load(tmp_path / "run", client=c).model.state_dict()["3.weight"] for c in (None, 0, 1)]
    assert not torch.equal(heads[1], heads[2]) and not torch.equal(heads[0], heads[1])
    with pytest.raises(everfed.UserError, match="clients 0 to 1"):
        load(tmp_path / "run", client=2)


def test_a_method_whose_clients_change_the_forward_pass_has_no_network_to_export(tmp_path: Path) -> None:
    everfed.run(recipe(write_data(tmp_path), method={"name": "feddbe"}), tmp_path / "run", checkpoint_every=0.0)
    with pytest.raises(everfed.UserError, match="forward pass"):
        load(tmp_path / "run", client=0)


def test_a_personal_model_is_loaded_with_the_data_in_another_folder(tmp_path: Path) -> None:
    """The folder of the run is gone; without another one the data set is not found."""
    (tmp_path / "then").mkdir()
    x, y = np.zeros((40, 8, 8, 3), dtype=np.uint8), np.arange(40) % 10
    np.savez(tmp_path / "then" / "mnist.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    everfed.run(recipe(Path("mnist")), tmp_path / "run", data_dir=tmp_path / "then", checkpoint_every=0.0)
    (tmp_path / "then").rename(tmp_path / "now")
    with pytest.raises(everfed.UserError, match="then"):
        load(tmp_path / "run", client=0)
    found = load(tmp_path / "run", client=0, data_dir=tmp_path / "now")
    assert found.predict(x).shape == (40,)


# files that came from somewhere --------------------------------------------------------------------------------------
def changed(run: Path, to: Path, **fields: Any) -> Path:
    """A copy of the run with a changed description in its model file; without one where nothing is left of it."""
    shutil.copytree(run, to)
    tensors = safetensors.torch.load_file(to / "model.safetensors")
    with safetensors.safe_open(to / "model.safetensors", "pt") as opened:
        table = {**json.loads(opened.metadata()[saved_model.KEY]), **fields}
    safetensors.torch.save_file(tensors, to / "model.safetensors", {saved_model.KEY: json.dumps(table)})
    return to


def test_a_model_file_runs_no_command(run: Path, tmp_path: Path) -> None:
    """subprocess.run(input_shape, bufsize=classes): the description is a call of anything that Python can import."""
    command = {
        "kind": "subprocess:run",
        "input_shape": ["touch", str(tmp_path / "taken")],
        "classes": -1,
        "options": {},
    }
    folder = changed(run, tmp_path / "copy", **command)
    for attempt in (lambda: everfed.load(folder), lambda: load(folder)):
        with pytest.raises(everfed.UserError, match=r"input_shape is|'subprocess' is not allowed here"):
            attempt()
        assert not (tmp_path / "taken").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "subprocess:getoutput"},
        {"adapted": [{"part": "subprocess:Popen", "args": ["touch", "taken"]}]},
        {"adapted": [{"part": "everfed.methods.registry:load_object"}]},
        {"kind": "everfed.models.pretrained:load_file"},  # of safetensors, which that module uses
    ],
)
def test_a_description_names_everfeds_own_code_or_what_is_allowed(
    fields: dict[str, Any], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(everfed.UserError, match=r"not allowed here|no class of everfed's own|is not a part"):
        load(changed(run, tmp_path / "copy", **fields))
    assert not (tmp_path / "taken").exists()


@pytest.mark.parametrize(
    "fields", [{"classes": "4"}, {"input_shape": 8}, {"options": []}, {"adapted": [5]}, {"mean": "x"}, {"further": 1}]
)
def test_a_damaged_description_is_an_error_that_says_so(fields: dict[str, Any], run: Path, tmp_path: Path) -> None:
    with pytest.raises(everfed.UserError, match="description in the model file is damaged"):
        load(changed(run, tmp_path / "copy", **fields))


BERT = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 10}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "timm_wrapper", "architecture": "hf-hub:someone/some"}, "'timm_wrapper' is not built from"),
        ({"model_type": "gpt2", "n_embd": 2048, "n_head": 8, "n_layer": 2}, "describes 2.*,.* parameters and holds"),
        ({**BERT, "hidden_act": "os:system"}, "cannot be built: 'os:system'"),
        ({**BERT, "torch_dtype": "load"}, "cannot be built|damaged"),
    ],
)
def test_a_configuration_in_a_model_file_fetches_nothing_and_fills_no_memory(
    config: dict[str, Any], message: str, run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="the extra `text` is not installed")
    described = {"kind": "hf:x", "rebuilding": {"config": config}, "options": {"task": "next-token"}}
    with pytest.raises(everfed.UserError, match=message):
        load(changed(run, tmp_path / "copy", **described))


def test_a_folder_of_others_names_no_code_by_its_recipe(run: Path, tmp_path: Path) -> None:
    """Where the file has no description the recipe is used, which names the network."""
    with pytest.raises(everfed.UserError, match=f"the module '{__name__}' is not allowed here"):
        everfed.load(run)
    shutil.copytree(run, tmp_path / "copy")
    tensors = safetensors.torch.load_file(run / "model.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "copy" / "model.safetensors")
    text = (run / "recipe.toml").read_text().replace(f"{__name__}:Net", "subprocess:run")
    (tmp_path / "copy" / "recipe.toml").write_text(text)
    write_data(run.parent)
    try:
        with pytest.raises(everfed.UserError, match="'subprocess' is not allowed here"):
            everfed.load(tmp_path / "copy")
    finally:
        (run.parent / "trees.npz").unlink()
