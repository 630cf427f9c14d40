"""The pretraining script writes a file that a network of another number of classes takes over."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks import pretrain_vit
from everfed import models


def test_a_rate_warms_up_and_falls_by_a_cosine() -> None:
    rates = [pretrain_vit.rate(step, 2, 6) / pretrain_vit.RATE for step in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466])


def test_a_pretrained_file_fits_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "vit.safetensors"
    pretrain_vit.main(["--dataset", "digits", "--epochs", "6", "--device", "cpu", "--out", str(out)])
    module = models.build("vit", (1, 8, 8), 10, 1, dict(pretrain_vit.SETTINGS["digits"].options))
    missing, unexpected = module.load_state_dict(load_file(out), strict=False)
    assert not unexpected and missing == ["head.weight", "head.bias"]
    with safe_open(out, "pt") as file:
        made = file.metadata()
    assert made["classes"] == "5" and made["width"] == "64"
    assert float(made["accuracy"]) > 0.3  # of five classes; chance is 0.2
    assert f"accuracy = {made['accuracy']}" in capsys.readouterr().out
