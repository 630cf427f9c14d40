"""`everfed show`: what a method, a recipe, a data set or a part is."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from everfed.commands import options
from everfed.core.option import TABLES, Option, declared_options
from everfed.errors import UserError
from everfed.naming import nearest

Facts = dict[str, Any]
WIDTH = 100


def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A method, a recipe, one of its tables, a data set or a part.")
    ],
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Explain a method, a recipe, one of its tables, a data set or a part.

    Of a method: what it does, its parts with their options and defaults, what
    it exchanges beside the model, what it needs to know, what the server sees
    of single clients, and its papers as BibTeX.

    \b
    Examples:
      everfed show fedgp+der
      everfed show fedgp/table1-rotated-mnist
      everfed show mnist --data ~/data
      everfed show train.optimizer
    """
    facts = _facts(name, data)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        typer.echo(_shown(key, value))


def _facts(name: str, data: Path | None) -> Facts:
    from everfed.data.available import available
    from everfed.methods import registry as methods
    from everfed.recipe import shipped as recipes

    chosen = methods.canonical(name)
    if methods.about(chosen):
        return _method(chosen)
    if name in recipes.names() or name.endswith(".toml"):
        return _recipe(name)
    sets = {known: (found, where) for known, found, where in available(data)}
    if name in sets or Path(name).exists():
        return _dataset(name, data, *sets.get(name, (True, name)))
    if name in TABLES:
        return {"table of a recipe": name, "options": _options(TABLES[name])}
    if name in methods.PARTS or ":" in name:
        return {"part": name, **_part(methods.part_class(name))}
    known = [*methods.names(), *recipes.names(), *sets, *methods.PARTS]
    raise UserError(f"there is no method, recipe, data set or part {name!r}.{nearest(name, known)}")


def _method(name: str) -> Facts:
    from everfed.core.part import PLAIN, SHARED, WHOLE
    from everfed.methods import registry as methods
    from everfed.methods.registry import family, papers
    from everfed.privacy.reveals import sentence, values_sent

    method = methods.build(name)
    excluding = {
        SHARED: "parts that keep some parameters on the clients",
        WHOLE: "parts that train some parameters at a time",
        PLAIN: "parts that change the network's forward pass",
    }
    beside = [_exchange(phase) for phase in method.own_phases]
    words = {word for part in method.parts for word in part.needs()} - {part.name for part in method.parts}
    rules_out = [about for word, about in excluding.items() if word in words]
    return {
        "method": name,
        "about": methods.about(name),
        "parts": {part.name: _part(type(part), part) for part in method.parts},
        "exchanges beside training": beside or "none",
        "needs": sorted(words - excluding.keys()) or "nothing",
        **({"not beside": rules_out} if rules_out else {}),
        "scored": "on the clients, with their own models" if method.personal else "on the server, the shared model",
        "server needs": sentence(method.reveals()),
        "server sees": values_sent(method),
        "cost": f"on your data: everfed run RECIPE --method {name} --dry-run",
        "family": family(name),
        "to cite": "\n".join(paper.bibtex for paper in papers(name)) or "no paper",
    }


_WHO = {"sampled": "this round's clients", "all": "all clients", "boundary": "clients whose task begins or ends"}
_WHEN = {"first": "in the first round", "begin": "when a task begins", "end": "when a task ends",
         "request": "on request"}  # fmt: skip


def _exchange(phase: Any) -> str:
    """A phase of a part in words: who takes part, and when."""
    rounds = phase.rounds.every
    when = _WHEN.get(phase.rounds.kind) or ("in every round" if rounds == 1 else f"in every {rounds}th round")
    return f"{phase.name}: {_WHO.get(phase.cohort.value, 'the server alone')}, {when}"


def _part(kind: type[Any], made: Any = None) -> Facts:
    """What a part's file and class say of themselves, and its options: as the method sets them, else the defaults."""
    paper = inspect.getdoc(sys.modules[kind.__module__]) or ""
    own = "" if kind.__doc__ == _signature(kind) else " ".join((inspect.getdoc(kind) or "").split())
    return {
        "about": " ".join(paper.partition("\n\n")[0].split()),
        **({"explained": own} if own else {}),
        "options": _options(kind, made),
    }


def _options(kind: type[Any], made: Any = None) -> Facts:
    return {
        name: _option(name, declared, kind, made)
        for name, declared in declared_options(kind)
        if declared.about or kind not in TABLES.values()
    }


def _option(name: str, declared: Option, kind: type[Any], made: Any) -> str:
    """Its value as the method sets it, else the default; what it may be, and what it means."""
    field = next(field for field in fields(kind) if field.name == name)
    default = field.default if field.default is not MISSING else "needed"
    value = getattr(made, name) if made is not None else default
    allowed = f" ({declared.allowed})" if declared.allowed else ""
    return f"{value}{allowed}{': ' if declared.about else ''}{declared.about}"


def _signature(kind: type[Any]) -> str:
    """What a dataclass without a docstring has for one."""
    return f"{kind.__name__}{inspect.signature(kind)}".replace(" -> None", "")


def _recipe(name: str) -> Facts:
    from everfed.recipe import read
    from everfed.recipe import shipped as recipes

    recipe = read(name)
    text = recipes.text(name) if name in recipes.names() else Path(name).read_text(encoding="utf-8")
    head = [line.removeprefix("#").strip() for line in text.partition("\n\n[")[0].splitlines() if line.startswith("#")]
    compared = recipe.compare
    return {
        "recipe": name,
        "about": "\n".join(head),
        "stream": recipe.stream.model_dump(),
        "model": recipe.model.model_dump(),
        "train": recipe.train.model_dump(exclude_defaults=True),
        "method": recipe.method.name or ", ".join(map(str, recipe.method.parts or ())),
        "compares": f"{', '.join(compared.methods)} over seeds {compared.seeds}" if compared else "nothing",
    }


# what a network has an output for, by the kind of targets
OUTPUTS = {"classes": "classes", "multi-label": "labels, several a sample", "regression": "numbers to predict"}


def _dataset(name: str, data: Path | None, found: bool, where: str) -> Facts:
    from everfed.data import DataError, load

    facts: Facts = {"data set": name, "place" if found else "not found": where}
    if not found:
        return facts
    try:
        source = load(name, data)
    except DataError:  # several domains, scenes, utterances: their streams alone read them
        return facts
    shape, more = tuple(source.x_train.shape[1:]), ", ..." if source.classes > 12 else ""
    return {
        **facts,
        "samples": f"{len(source.x_train)} to train on, {len(source.x_test)} to test, each {shape}",
        OUTPUTS[source.targets]: f"{source.classes}: {', '.join(source.class_names[:12])}{more}",
    }


def _shown(key: str, value: Any, indent: str = "") -> str:
    """A fact and what is in it, indented and wrapped."""
    inner = f"{indent}  "
    if isinstance(value, dict) and value:
        return "\n".join([f"{indent}{key}:", *(_shown(name, entry, inner) for name, entry in value.items())])
    if isinstance(value, list) and any(isinstance(entry, str) for entry in value):
        return "\n".join([f"{indent}{key}:", *(f"{inner}{entry}" for entry in value)])
    text = f"{indent}{key}: {value or 'none' if isinstance(value, dict) else value}"
    if "\n" in text:
        return "\n".join([f"{indent}{key}:", *(f"{inner}{line}".rstrip() for line in str(value).splitlines())])
    return textwrap.fill(text, WIDTH, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)
