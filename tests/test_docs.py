"""The documentation builds without a broken link, its commands are commands, and its examples run."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from typer.testing import CliRunner

import everfed
from everfed.cli import app
from everfed.core.option import declared_options
from everfed.core.part import HOOKS
from everfed.methods import registry as methods
from everfed.methods.replay.memory import POLICIES, policy_class
from everfed.methods.replay.sample_gradients import GradientOptions
from everfed.recipe import shipped as recipes
from tests.support.child import Child

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
CLI = typer.main.get_command(app)
FENCE = re.compile(r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"(?:^    .*\n)+", re.M)
# everfed itself, behind a variable, in another folder, or under torchrun
COMMAND = re.compile(r"\s*(?:\w+=.*? |cd \S+ && |torchrun .*? -m )?everfed (?=[a-z])(.*)")
SHELLS = ("console", "sh", "bash")


@dataclass(frozen=True)
class Block:
    """A fenced block. note: the comment right before it. lead: the text before it, back to the last block."""

    language: str
    code: str
    note: str
    lead: str


def blocks(text: str) -> Iterator[Block]:
    end = 0
    for found in FENCE.finditer(text):
        yield Block(found["language"], found["code"], found["note"] or "", text[end : found.start()])
        end = found.end()


def commands(text: str) -> list[str]:
    """What is written after `everfed` in the shell blocks of a page, fenced or indented."""
    lines = [line for block in blocks(text) if block.language in SHELLS for line in _lines(block.code)]
    lines += [line for found in INDENTED.findall(FENCE.sub("", text)) for line in _lines(found)]
    return [found[1] for line in lines if (found := COMMAND.match(line))]


def _lines(code: str) -> list[str]:
    return re.sub(r"\\\n\s*", " ", code).splitlines()


def is_placeholder(word: str) -> bool:
    """RECIPE, METHOD: for the reader to fill in."""
    return word.isupper()


ALL = [(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in commands(page.read_text())]


def test_commands_are_found() -> None:
    fenced = "```console\nA=1 everfed run demo \\\n    --seed 1  # why\nmake demo\n```\n"
    text = f"{fenced}\n    make test  # installs everfed for tests\n    everfed list methods\n\neverfed is"
    assert commands(text) == ["run demo  --seed 1  # why", "list methods"]
    assert len(ALL) > 60


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{page}: {command[:60]}" for page, command in ALL])
def test_a_command_in_the_documentation_is_one(page: str, command: str) -> None:
    name, *arguments = shlex.split(re.sub(r"\bSEED\b", "0", command), comments=True)
    assert name in CLI.commands, f"{page}: everfed has no command {name!r}"
    parsed = CLI.commands[name].make_context(name, arguments).params
    chosen = [parsed.get("method"), *(parsed.get("methods") or "").split(",")]
    for method in (m for m in chosen if m and not is_placeholder(m) and ":" not in m):  # with one: the reader's own
        methods.build(method)
    recipe = parsed.get("recipe")
    if recipe and not is_placeholder(recipe) and not recipe.endswith(".toml"):
        assert recipe in recipes.names(), f"{page}: there is no recipe {recipe!r}"


def test_the_documentation_builds_without_a_broken_link(site: Path) -> None:
    """A link that leads nowhere is an error of the build, which is strict."""
    assert "Adding a method" in (site / "contributing.html").read_text()
    assert "run_client" in (site / "protocol.html").read_text()
    api = (site / "api.html").read_text()
    assert "everfed.core.part.Part" in api and "When a round begins" in api


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "REPRODUCIBILITY.md"])
def test_links_outside_the_site_lead_somewhere(page: str) -> None:
    path = ROOT / page
    if not path.exists():
        pytest.skip(f"{page} is not there")
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "methods").glob("*.md")), ids=lambda page: page.stem)
def test_a_method_s_page_says_in_its_first_line_when_to_use_it(page: Path) -> None:
    if page.stem != "index":
        heading, blank, first, *_ = page.read_text().splitlines()
        assert heading.startswith("# ") and blank == "", page.name
        assert re.match(r"Use (it|them) (when|whenever|as|beside|instead of) .*\.$", first), first


OPTIONS = runpy.run_path(str(ROOT / "docs" / "options.py"))


def test_the_tables_of_options_are_those_of_the_code() -> None:
    pages = {page: page.read_text() for page in PAGES}
    stale = [page.name for page, text in pages.items() if OPTIONS["tables"](text) != text]
    assert stale == [], "run python docs/options.py"


def _shown() -> set[tuple[type, str]]:
    """(class, option) of every generated row."""
    marks = [mark for page in PAGES for mark in re.findall(r"^<!-- options: (.*?) -->$", page.read_text(), re.M)]
    found = set()
    for name in " ".join(marks).split():
        owner, _, only = name.partition(".")
        kind = OPTIONS["owner_class"](owner)
        found |= {(kind, option) for option, _ in declared_options(kind) if only in ("", option)}
    return found


def test_every_option_of_a_method_stands_in_a_generated_table() -> None:
    """In that of its class, or of a shipped class that it is inherited from, with the same default."""
    shown, missing = _shown(), []
    for kind in (*methods.part_classes().values(), *map(policy_class, POLICIES), GradientOptions):
        for field in fields(kind):
            bases = [base for base in kind.__mro__ if (base, field.name) in shown]
            if all(base.__dataclass_fields__[field.name].default != field.default for base in bases):
                missing.append(f"{kind.__name__}.{field.name}")
    assert missing == []


def test_every_option_of_a_method_is_declared_with_its_meaning() -> None:
    kinds = (*methods.part_classes().values(), *map(policy_class, POLICIES), GradientOptions)
    found = [(kind.__name__, name) for kind in kinds for name, option in declared_options(kind) if not option.about]
    assert found == []


def test_files_of_the_code_that_a_method_s_page_names_exist() -> None:
    pages = (ROOT / "docs" / "methods").glob("*.md")
    named = {
        name
        for page in pages
        for name in re.findall(r"`((?:everfed|tests|benchmarks)/[\w./-]+\.\w+)`", page.read_text())
    }
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_method_stands_under_one_family_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^          - .*: methods/(.*)\.md$", text, re.M)  # two levels below "Methods"
    pages = {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")} - {"index"}
    assert sorted(listed) == sorted(pages)


def test_no_braces_at_the_end_of_a_cell_are_taken_for_attributes() -> None:
    """The extension attr_list removes them from the page: "tune it in {1, 10}" became "tune it in"."""
    cells = re.compile(r"^\|.*(?<![$`}])\{[^}`|$]*\} *\|", re.M)
    plain = {page.name: re.sub(r"`[^`]*`|\$[^$]*\$", "", page.read_text()) for page in PAGES if page.parent != ROOT}
    assert {name: found for name, text in plain.items() if (found := cells.findall(text))} == {}


def test_the_first_screen_of_the_readme_has_pictures_that_are_small_files() -> None:
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:16])
    shown = re.findall(r"!\[[^\]]+\]\((docs/images/[\w.-]+)\)", first)
    assert [Path(name).name for name in shown] == ["result.png", "report.png", "dashboard.png", "round.svg"]
    assert all((ROOT / name).stat().st_size < 200_000 for name in shown)


# the tutorial ----------------------------------------------------------------------------------------------------


def file_of(block: Block) -> str:
    """The file that a block is the content of: the last one its paragraph names, with a colon at the end."""
    found = re.findall(r"`([\w.]+\.(?:py|toml))`:\s*$", block.lead)
    return found[-1] if found else ""


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("scale", ["0.01", pytest.param("", marks=pytest.mark.slow)], ids=["small", "as written"])
def test_the_tutorial_works_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: str) -> None:
    """By default with a hundredth of the work of every run and without figures as files, which take many seconds and
    have tests of their own; that changes no command otherwise."""
    monkeypatch.chdir(tmp_path)
    if scale:
        monkeypatch.setattr("everfed.reports.paper.write", lambda groups, folder: [])
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in blocks((ROOT / "docs/tutorial.md").read_text()):
        if file_of(block):
            (tmp_path / file_of(block)).write_text(block.code)
        elif block.language == "python":
            exec(compile(block.code, "tutorial", "exec"), {"__name__": "tutorial"})
        elif block.language in SHELLS:
            expected = 2 if block.note == "refused" else 0
            for line in _lines(block.code):
                _run(line, expected, scale)
    monkeypatch.delitem(sys.modules, "anchor", raising=False)
    made = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("result.json")}
    assert {"runs/first", "runs/clinic/fedgp-er", "runs/clinic/anchor", "runs/clinic/all", "runs/from-python"} <= made
    assert (tmp_path / "runs/clinic.html").exists() and not (tmp_path / "runs/no").exists()


def _run(line: str, expected: int, scale: str) -> None:
    """Runs what begins with everfed; `make demo` has tests of its own, and an environment is active here."""
    name, *arguments = shlex.split(line)
    if scale and arguments and arguments[0] in ("run", "compare", "sweep"):
        arguments += ["--scale", scale]  # the last one counts
    assert name == "everfed" or line in ("make demo", ". .venv/bin/activate"), line
    if name == "everfed":
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == expected, f"{line}\n{done.output}"


def test_what_the_guide_to_choosing_says_about_methods() -> None:
    (block,) = (b for b in blocks((ROOT / "docs/choosing.md").read_text()) if b.language == "python")
    for call, said in re.findall(r"print\((methods\..*?)\)\s+# (\{.*?\}):", block.code):
        assert str(eval(call, {"methods": methods})) == said


def test_the_stream_of_the_streams_page_runs(tmp_path: Path) -> None:
    (code,) = (b.code for b in blocks((ROOT / "docs/streams.md").read_text()) if "(Stream)" in b.code)
    names: dict[str, Any] = {"__name__": "streams_page"}
    exec(compile(code, "streams", "exec"), names)
    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    data = [everfed.method.Data(part, part.argmax(1), np.arange(30)) for part in x.split(30)]
    stream = names["InTurn"]([(data[0], data[1]), (data[2], data[3])], clients=3, rounds_per_task=2)
    recipe = {"model": {"kind": "mlp"}, "method": {"name": "fedgp+er"}, "eval": {"zero_shot": True}}
    result = everfed.run(recipe, tmp_path / "run", stream=stream)
    assert result.data["stream"] == {"name": "in-turn"} and result.data["n_test"] == [30, 30]
    assert result.metrics["fwt"] is not None


# contributing ----------------------------------------------------------------------------------------------------

REGISTERED = """\
import sys

from dusk import Dusk

from everfed import streams
from everfed.data import catalogue
from everfed.methods import registry as methods

methods.PRESETS.update(eval({preset!r}, vars(methods)))
catalogue.KNOWN.update(eval({known!r}, vars(catalogue)))
sys.modules["everfed.streams.dusk"] = sys.modules["dusk"]
streams.SCENARIOS[Dusk.scenario] = ("dusk:Dusk", "the same images, darker in every task")
"""
TOGETHER = """\
import everfed


def test_the_three_together(tmp_path):
    stream = {"dataset": "digits", "scenario": "dusk", "darkest": 0.5, "tasks": 2, "clients": 3, "max_train": 90}
    recipe = {"stream": {**stream, "max_test": 60}, "model": {"kind": "mlp", "hidden": [8]}}
    recipe |= {"train": {"rounds_per_task": 2}, "method": {"name": "fedgp+with-momentum", "momentum": {"beta": 0.5}}}
    result = everfed.run(recipe, tmp_path / "run").data
    assert result["stream"]["brightness"] == [1.0, 0.5] and result["method"] == "fedgp+with-momentum"
"""


def test_the_examples_for_contributors_work(tmp_path: Path) -> None:
    pages = ("CONTRIBUTING.md", "docs/streams.md", "docs/datasets.md")
    found = [block for page in pages for block in blocks((ROOT / page).read_text())]
    files = {"momentum.py": examples("docs/protocol.md")["momentum.py"]}
    for page in pages:
        files |= examples(page)
    assert set(files) == {"momentum.py", "test_momentum.py", "dusk.py", "test_dusk.py", "test_kmnist.py"}
    entries = {b.note: "{" + b.code + "}" for b in found if b.note in ("preset", "known")}
    for name, code in {**files, "conftest.py": REGISTERED.format(**entries), "test_together.py": TOGETHER}.items():
        (tmp_path / name).write_text(code)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = Child(tmp_path, "-q", "-p", "no:cacheprovider", str(tmp_path), module="pytest").wait()
    assert done.code == 0, done.stdout
    assert "6 passed" in done.stdout
    assert_linted(files, tmp_path)


def examples(page: str) -> dict[str, str]:
    """The complete files that a page shows, by name."""
    found = blocks((ROOT / page).read_text())
    return {b.note.removeprefix("example: "): b.code for b in found if b.note.startswith("example: ")}


def assert_linted(files: Iterable[str], folder: Path) -> None:
    # beside each other, modules sort as foreign ones, which in everfed they are not; RUF043 is off in its tests, too
    lint = ["ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--ignore", "I001,RUF043"]
    linted = subprocess.run([sys.executable, "-m", *lint, *files], cwd=folder, capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


# the protocol ----------------------------------------------------------------------------------------------------


def test_the_examples_of_the_protocol_run_and_change_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = examples("docs/protocol.md") | examples("docs/protocol-reference.md")
    assert set(files) == {"confidence.py", "momentum.py", "direction.py", "balanced.py"}
    assert max(len(code.splitlines()) for code in files.values()) <= 40
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    balanced = {"memory": {"size": 12, "policy": "balanced:Balanced"}}
    accuracies = [
        _matrix(tmp_path / str(index), parts, **options)
        for index, (parts, options) in enumerate(
            [
                (["fedavg"], {}),
                (["fedavg", {"part": "confidence:ConfidencePenalty", "weight": 0.5}], {}),
                (["fedavg", "momentum:ServerMomentum"], {}),
                (["fedavg", "direction:SharedDirection"], {}),
                (["fedavg", "memory", "er"], balanced),
            ]
        )
    ]
    assert all(found != accuracies[0] for found in accuracies[1:])
    for name in files:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    assert_linted(files, tmp_path)


def _matrix(folder: Path, parts: list[Any], **options: Any) -> Any:
    recipe = {
        "stream": {"dataset": "digits", "scenario": "class-incremental", "tasks": 2, "clients": 3, "max_train": 240},
        "model": {"kind": "mlp", "hidden": [16]},
        "train": {"rounds_per_task": 3, "optimizer": {"lr": 0.1}},
        "method": {"parts": parts, **options},
        "engine": {"kind": "eager"},
    }
    return everfed.run(recipe, folder).data["curves"], everfed.load(folder).model.state_dict()["head.bias"].tolist()


def test_every_hook_is_in_the_table_with_a_file_that_defines_it() -> None:
    text = (ROOT / "docs/protocol.md").read_text()
    rows = re.findall(r"^\| [\w-]* ?\| `(\w+)\(.*?\)` \| .* \| `(\w+/\w+\.py)` \|$", text, re.M)
    bases = re.findall(r"^\| `(?:Aggregator|Personal|AddsParameters|Protection)` \| (.*?) \|", text, re.M)
    rare = [name for cell in bases for name in re.findall(r"`(\w+)`", cell)]
    assert sorted([*(name for name, _ in rows), *rare]) == sorted(HOOKS)
    for hook, file in rows:
        assert re.search(rf"def {hook}\(", (ROOT / "everfed/methods" / file).read_text()), f"{file} has no {hook}"
