"""Papers of methods, as `everfed list` and `everfed show` cite them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everfed.cli import app
from everfed.methods import registry
from everfed.methods.registry import _papers, family, papers


def test_every_paper_is_of_a_method_or_part() -> None:
    assert set(_papers()) <= {*registry.PRESETS, *registry.PARTS}


@pytest.mark.parametrize(
    ("method", "cited"),
    [
        ("der++", ["Buzzega et al., NeurIPS 2020"]),
        ("fedgp+der", ["Dai et al., preprint 2023", "Buzzega et al., NeurIPS 2020"]),
        ("der+fedgp", ["Dai et al., preprint 2023", "Buzzega et al., NeurIPS 2020"]),
        ("lwf", ["Li and Hoiem, ECCV 2016"]),
        ("afl", ["He et al., CVPR 2025"]),
        ("fedavg", ["McMahan et al., AISTATS 2017"]),
        ("ideal", []),
    ],
)
def test_what_a_method_cites(method: str, cited: list[str]) -> None:
    assert [paper.short for paper in papers(method)] == cited


def test_families_are_the_folders_of_the_methods() -> None:
    found = {name: family(name) for name in registry.names()}
    root = Path(registry.__file__).parent
    assert all((root / folder).is_dir() for folder in found.values())
    assert (found["der"], found["fedgp+der"], found["mfcl"], found["lora"]) == (
        *("replay", "project", "generative", "pretrained"),
    )


def test_list_and_show() -> None:
    text = CliRunner().invoke(app, ["list", "methods"]).output
    assert re.search(r"^\| der +\| replay +\| Buzzega et al., NeurIPS 2020 +\| dark experience replay", text, re.M)
    shown = CliRunner().invoke(app, ["show", "der"]).output
    assert "@inproceedings{der," in shown and "author = {Buzzega, Pietro and others}" in shown
    facts = json.loads(CliRunner().invoke(app, ["show", "fedgp+der", "--json"]).output)
    assert facts["to cite"].count("@") == 2
