"""`everfed samples` on the embedded digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from everfed import api
from everfed.cli import app
from everfed.data import transforms
from everfed.session import samples
from everfed.session.samples import Sheet, draw, sample
from everfed.store.run import RunFolder

RECIPE = """\
[stream]
dataset = "digits"
scenario = "class-incremental"
tasks = 2
clients = 2
max_train = 60
max_test = 40

[model]
kind = "mlp"
hidden = [8]

[train]
rounds_per_task = 1
batch_size = 16
optimizer = { kind = "sgd", lr = 0.1 }
logits = "seen"

[eval]
logits = "seen"

[method]
name = "mfcl"

[method.defaults]
mfcl = { gen_steps = 4, gen_chunk = 2, gen_batch = 8, syn_batch = 4, z_dim = 6, gen_light = true }
"""


OTHERS = """\
fedcil = { server_steps = 1, server_batch = 4, noise = 2, width = 4 }
glfc = { old_model = "proxy", perturbation = 1, reconstruction = 1, iterates = 1 }
memory = { size = 20, policy = { kind = "on-transition", detect = "boundary" } }
"""


def everfed(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    (folder / "small.toml").write_text(RECIPE)
    api.run(folder / "small.toml", folder / "run")
    return folder / "run"


def test_a_run_draws_no_images_by_itself(run: Path) -> None:
    assert not list(run.glob("*.png"))


def test_a_sheet_is_written_with_the_note_on_privacy(run: Path, tmp_path: Path) -> None:
    from PIL import Image

    result = everfed("samples", str(run), "--out", str(tmp_path / "made" / "sheet.png"), "--per-class", "3")
    assert result.exit_code == 0, result.output
    assert "samples: " in result.stdout
    assert "may resemble what clients hold" in result.stderr
    with Image.open(tmp_path / "made" / "sheet.png") as image:
        assert image.width >= 3 * 64


def test_images_are_labelled_by_the_frozen_model_with_classes_it_knew(run: Path) -> None:
    folder = RunFolder.open(run)
    sheet, again = (sample(folder, api.reassemble(folder, on_cpu=True), 3) for _ in range(2))
    assert set(sheet.rows) <= set(range(5))  # the generator was trained after the first of two tasks
    assert all(rows.dtype == torch.uint8 and rows.shape[1:] == (1, 8, 8) for rows in sheet.rows.values())
    assert all(torch.equal(sheet.rows[label], again.rows[label]) for label in sheet.rows)


def test_every_batch_is_drawn_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.open(run)
    monkeypatch.setattr(samples, "BATCH", 20)
    monkeypatch.setattr(samples, "_sorted", lambda images, labels, names, width: images)
    images = sample(folder, api.reassemble(folder, on_cpu=True), 1)  # 4 tries for each of 10 classes
    assert len(images) == 40 and not torch.equal(images[:20], images[20:])


def test_a_method_without_a_generator_is_refused(run: Path, tmp_path: Path) -> None:
    recipe = (run.parent / "small.toml").read_text().replace('name = "mfcl"', 'name = "fedavg"')
    (tmp_path / "plain.toml").write_text(recipe)
    api.run(tmp_path / "plain.toml", tmp_path / "plain")
    result = everfed("samples", str(tmp_path / "plain"))
    assert result.exit_code == 2
    assert "method 'fedavg' has no generator" in result.stderr


def test_what_fedcils_generator_and_glfcs_proxy_made_can_be_looked_at(run: Path, tmp_path: Path) -> None:
    recipe = (run.parent / "small.toml").read_text()
    shown = {}
    for method in ("fedcil", "glfc"):
        (tmp_path / f"{method}.toml").write_text(recipe.replace('name = "mfcl"', f'name = "{method}"') + OTHERS)
        api.run(tmp_path / f"{method}.toml", tmp_path / method)
        folder = RunFolder.open(tmp_path / method)
        shown[method] = sample(folder, api.reassemble(folder, on_cpu=True), 2).rows
    assert set(shown["fedcil"]) == set(range(10)) and all(len(rows) == 2 for rows in shown["fedcil"].values())
    assert shown["glfc"] and set(shown["glfc"]) <= set(range(10))


def test_features_are_no_images(run: Path, tmp_path: Path) -> None:
    recipe = (run.parent / "small.toml").read_text().replace('name = "mfcl"', 'name = "af-fcl"')
    (tmp_path / "flow.toml").write_text(recipe + "af-fcl = { hidden = 4 }\n")
    api.run(tmp_path / "flow.toml", tmp_path / "flow")
    result = everfed("samples", str(tmp_path / "flow"))
    assert result.exit_code == 2 and "has no generator of images" in result.stderr


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "is not a run" in everfed("samples", str(tmp_path)).stderr


def test_a_sheet_has_a_row_per_class_and_its_name(tmp_path: Path) -> None:
    from PIL import Image

    rows = {label: torch.full((2, 3, 32, 32), 100 * label, dtype=torch.uint8) for label in (0, 2)}
    path = draw(Sheet(rows, ("apple", "b", "chair"), 4), tmp_path / "sheet.png")
    with Image.open(path) as image:
        assert image.height == 2 * 66 + 8  # 32 pixels doubled, a gap of 2, margins of 4
        assert image.getpixel((image.width - 4 * 66 - 4 + 10, 66 + 10)) == (200, 200, 200)
        assert image.getpixel((image.width - 10, 10)) == (255, 255, 255)  # two images of four


def test_pixels_are_the_inverse_of_network_inputs() -> None:
    x = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 3, 16, 16)
    for mean, std in (((), ()), ((0.5,), (0.5,)), ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))):
        assert torch.equal(transforms.unscale(transforms.scale(x.clone(), mean, std), mean, std), x)


def test_a_run_goes_on_in_the_memory_order_it_began_with(run: Path, tmp_path: Path) -> None:
    settings = json.loads((run / "settings.json").read_text())
    assert settings["memory_format"] == "contiguous"  # on a CPU
    settings["memory_format"] = "channels-last"
    copy = RunFolder.create(tmp_path / "copy", (run / "recipe.toml").read_text(), settings)
    assert api.reassemble(copy).recipe.engine.memory_format == "channels-last"
