"""What an installation rests on: declared imports, metadata, images for containers, scripts for clusters."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import everfed

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLUSTER = ROOT / "examples" / "cluster"


def declared() -> set[str]:
    """The distributions that pyproject.toml names, outside of tools for development."""
    extras = PROJECT["optional-dependencies"]
    lines = [
        *PROJECT["dependencies"],
        *(line for name in extras if name not in ("dev", "docs") for line in extras[name]),
    ]
    return {normal(re.match(r"[\w.-]+", line)[0]) for line in lines}


def normal(name: str) -> str:
    """A distribution's name as the packaging standard compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def imported() -> dict[str, str]:
    """{package: a file of everfed that imports it}, without the standard library and everfed itself."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "everfed").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            found |= {name.partition(".")[0]: path.name for name in names}
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, "everfed"}}


# Not in any extra: triton comes with torch's builds for GPUs; timm, which needs the torchvision of the same torch, is
# named by the refusal of model.kind = "timm:..."; IPython is there wherever a notebook runs.
BY_HAND = {"triton", "timm", "ipython"}


def test_every_import_is_declared() -> None:
    owners = {name: set(map(normal, found)) for name, found in metadata.packages_distributions().items()}
    known = declared() | BY_HAND
    missing = {name: path for name, path in imported().items() if not owners.get(name, {normal(name)}) & known}
    assert missing == {}


def test_the_metadata_has_what_a_reader_looks_for() -> None:
    assert PROJECT["readme"] == "README.md" and {"Homepage", "Documentation", "Changelog", "Issues"} <= set(
        PROJECT["urls"]
    )
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    classifiers = PROJECT["classifiers"]
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)
    assert "Operating System :: POSIX" in classifiers and not [c for c in classifiers if "OS Independent" in c]


def test_the_core_has_no_caps_that_only_an_extra_needs() -> None:
    core = {re.match(r"[\w-]+", line)[0]: line for line in PROJECT["dependencies"]}
    assert "click" not in core and "<" not in core["rich"]
    (datasets,) = (line for line in PROJECT["optional-dependencies"]["hub"] if line.startswith("datasets"))
    assert "<" not in datasets


def test_the_citation_agrees_with_the_metadata() -> None:
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and {"message", "title", "authors"} <= set(cited)
    assert (cited["version"], cited["license"]) == (everfed.__version__, PROJECT["license"])
    assert cited["repository-code"] == PROJECT["urls"]["Homepage"]


def test_every_page_of_the_documents_says_its_version() -> None:
    assert f"\ncopyright: everfed {everfed.__version__}. " in (ROOT / "mkdocs.yml").read_text()


# a release -----------------------------------------------------------------------------------------------------------
def notes(tag: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / ".ci" / "notes", tag], capture_output=True, text=True, check=False)


def test_the_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    found = notes(f"v{everfed.__version__}")
    assert found.returncode == 0, found.stderr
    assert "### Added" in found.stdout and "## [" not in found.stdout.replace("### ", "")


def test_a_tag_of_another_version_is_not_released() -> None:
    found = notes("v0.9")
    assert (found.returncode, found.stdout) == (1, "")
    assert f"the tag is v0.9, but everfed/__init__.py says {everfed.__version__}" in found.stderr


def workflow(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_every_supported_python_is_tested_by_the_script_that_tests_everywhere() -> None:
    job = workflow("ci")["jobs"]["test"]
    classifiers = [line.rpartition(":: ")[2] for line in PROJECT["classifiers"]]
    assert job["strategy"]["matrix"]["python"] == [name for name in classifiers if re.match(r"3\.\d", name)]
    assert commands(job) == [".ci/run"]


@pytest.mark.parametrize("name", ["ci", "documents", "newest", "release"])
def test_a_workflow_calls_programs_and_targets_that_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    called = [command for job in workflow(name)["jobs"].values() for command in commands(job)]
    for program, *rest in map(str.split, called):
        known = {"make": rest[:1] and rest[0] in targets, "gh": True}
        assert known.get(program, os.access(ROOT / program, os.X_OK)), called


# containers ----------------------------------------------------------------------------------------------------------
def extras_named(text: str) -> set[str]:
    return {name for group in re.findall(r"'\.\[([\w,]+)\]'", text) for name in group.split(",")}


def test_the_image_is_made_of_files_that_are_here() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.M) for name in line.split()[:-1]]
    assert copied == ["pyproject.toml", "README.md", "LICENSE", "constraints.txt", "everfed"]
    assert all((ROOT / name).exists() for name in copied)
    allowed = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert allowed == set(copied)  # everything else stays out of the build
    assert extras_named(text) and extras_named(text) <= set(PROJECT["optional-dependencies"])
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert re.search(r"ARG TORCH=(.*)", text)[1] in pins
    assert "USER everfed" in text


def test_compose_builds_that_image_for_the_server_and_the_clients() -> None:
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    folder = ROOT / "examples" / "federation"
    services: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    for name in ("server", "site-a", "site-b"):
        build = services[name]["build"]
        assert (folder / build["context"] / build["dockerfile"]).resolve() == ROOT / "Dockerfile"


def test_the_apptainer_definition_has_its_sections_and_files() -> None:
    text = (CLUSTER / "everfed.def").read_text()
    header, *rest = re.split(r"^%(?=\w)", text, flags=re.M)
    sections = {part.partition("\n")[0]: part.partition("\n")[2] for part in rest}
    assert "Bootstrap: docker" in header and re.search(r"^From: python:3\.\d+-slim$", header, re.M)
    assert list(sections) == ["files", "post", "environment", "runscript", "test", "labels"]
    assert all((ROOT / line.split()[0]).exists() for line in sections["files"].split("\n") if line.strip())
    assert extras_named(text) and extras_named(text) <= set(PROJECT["optional-dependencies"])
    for name in ("post", "environment", "runscript", "test"):
        subprocess.run(["sh", "-n"], input=sections[name], text=True, check=True)


# clusters ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment in which Slurm's commands and everfed print what they are called with."""
    commands = {
        "scontrol": 'printf "node-a\\nnode-b\\n"',
        "srun": 'exec "$@"',
        "torchrun": 'printf "torchrun"; printf " %s" "$@"',
        "everfed": 'printf "everfed"; printf " %s" "$@"',
    }
    for name, body in commands.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def submitted(script: str, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(CLUSTER / script), *words], env=environment, capture_output=True, text=True, check=False
    )


def test_a_run_on_several_machines(slurm: dict[str, str]) -> None:
    job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    done = submitted("ranks.sbatch", {**slurm, **job}, "my recipe.toml", "runs/big", "--set", "seed=3")
    assert done.stderr == ""
    assert done.stdout == (
        "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node-a:23456 --rdzv-id 123456 "
        "-m everfed run my recipe.toml --out runs/big --resume-or-run --set engine.kind=ranks --set seed=3"
    )


def test_a_job_can_be_put_back_into_the_queue() -> None:
    text = (CLUSTER / "ranks.sbatch").read_text()
    assert "#SBATCH --requeue" in text and "#SBATCH --open-mode=append" in text and "--resume-or-run" in text
    assert text.index("#SBATCH") < text.index("set -euo pipefail")  # Slurm reads none behind the first command
