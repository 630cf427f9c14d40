"""[privacy] in a recipe: what a user writes, and what a run folder holds after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import everfed.api as api
from everfed.errors import CompositionError, RecipeError
from everfed.recipe import from_table
from everfed.reports.html import render
from everfed.reports.read import read_run
from everfed.session import build_method


def table(privacy: dict[str, Any], method: str = "fedgp+der", engine: str = "eager") -> dict[str, Any]:
    return {
        "name": "private",
        "stream": {
            "dataset": "digits",
            "scenario": "domain-incremental",
            "transform": "rotate",
            "tasks": 2,
            "clients": 4,
        },
        "model": {"kind": "mlp", "hidden": [16]},
        "train": {"rounds_per_task": 2, "optimizer": {"lr": 0.05}},
        "method": {"name": method},
        "engine": {"kind": engine},
        "privacy": privacy,
    }


def trained(folder: Path) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in api.load(folder).model.parameters()])


def test_secure_aggregation_by_recipe_ends_like_the_plain_run(tmp_path: Path) -> None:
    results = {}
    for name, privacy, engine in (
        ("plain", {}, "eager"),
        ("secure", {"secure_aggregation": True}, "eager"),
        ("processes", {"secure_aggregation": True}, "processes"),
    ):
        results[name] = api.run(table(privacy, engine=engine), tmp_path / name, scale=0.5)
    plain, secure, processes = (trained(tmp_path / name) for name in results)
    assert torch.allclose(plain, secure, rtol=0, atol=1e-3) and torch.equal(secure, processes)
    assert results["secure"].data["environment"]["secure_aggregation"] is True
    assert results["secure"].metrics["acc"] == pytest.approx(results["plain"].metrics["acc"], abs=0.02)
    by_part = results["secure"].data["cost"]["bytes_by_part"]
    assert by_part["secure"]["up"] > 0 and by_part["fedavg"]["up"] == 0
    lines = (tmp_path / "secure" / "events.jsonl").read_text().splitlines()
    assert all("absent" not in json.loads(line) for line in lines)


def test_a_method_that_collects_is_refused_before_anything_runs() -> None:
    with pytest.raises(CompositionError, match=r"privacy.secure_aggregation: method 'stamp'.*phase 'train'"):
        build_method(from_table(table({"secure_aggregation": True}, "stamp")))


@pytest.mark.parametrize(
    "privacy", [{"threshold": 0.4}, {"threshold": 1.5}, {"clip": 0.0}, {"bits": 64}, {"secure": True}]
)
def test_keys_are_checked(privacy: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="privacy"):
        from_table(table(privacy))


def test_differential_privacy_by_recipe_reports_what_it_spent(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="pip install 'everfed[privacy]'")
    result = api.run(table({"dp": {"noise": 2.0, "clip": 1.0}}, "fedavg"), tmp_path / "dp", scale=0.5)
    facts = result.data["parts"]["dp"]
    assert 0 < facts["epsilon"] < 20 and facts["releases"] == 2 and facts["delta"] == 1e-5
    lines = [json.loads(line) for line in (tmp_path / "dp" / "events.jsonl").read_text().splitlines()]
    spent = [line["epsilon"] for line in lines if line["event"] == "measure" and line["part"] == "dp"]
    assert len(spent) == 2 and spent[-1] == facts["epsilon"]
    page = render([read_run(tmp_path / "dp")])
    assert f"epsilon {facts['epsilon']:.4g}, delta 1e-05" in page and "What parts measured" in page
