"""The papers of methods: what `everfed list` and `everfed show` cite, as text and as BibTeX."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from everfed.methods.registry import ALIASES, PARTS, canonical, preset

_ON_TOP = "fedgp+"


@dataclass(frozen=True)
class Citation:
    """key: of its BibTeX entry."""

    key: str
    authors: str
    title: str
    venue: str
    year: int

    @property
    def short(self) -> str:
        """As "Buzzega et al., NeurIPS 2020"."""
        names = [name.partition(",")[0] for name in self.authors.split(" and ")]
        who = names[0] if len(names) == 1 else " and ".join(names) if len(names) == 2 else f"{names[0]} et al."
        who = who.replace(" and others", " et al.")
        return f"{who}, {self.venue} {self.year}"

    @property
    def bibtex(self) -> str:
        """An entry; {{...}} keeps the title's capitals."""
        kind, where = (
            ("misc", "howpublished")
            if ":" in self.venue or self.venue == "preprint"
            else ("inproceedings", "booktitle")
        )
        lines = {"author": self.authors, "title": f"{{{self.title}}}", where: self.venue, "year": str(self.year)}
        body = ",\n".join(f"  {key} = {{{value}}}" for key, value in lines.items())
        return f"@{kind}{{{self.key},\n{body}\n}}"


@cache
def _papers() -> dict[str, Citation]:
    """By the name of a method or part."""
    table = tomllib.loads(resources.files("everfed.methods").joinpath("papers.toml").read_text(encoding="utf-8"))
    found = {}
    for key, entry in table.items():
        paper = Citation(key, entry["authors"], entry["title"], entry["venue"], entry["year"])
        found.update(dict.fromkeys(entry.get("names", [key]), paper))
    return found


def papers(method: str) -> list[Citation]:
    """Of a method's name, its own first: that of the preset, else those of its parts beside averaging."""
    base = canonical(method).removeprefix(_ON_TOP)
    base = ALIASES.get(base, base)
    found = preset(base)
    parts = found.parts if found else (base,)
    names = [base] if base in _papers() else [part for part in parts if part != "fedavg" or len(parts) == 1]
    names = ["fedgp", *names] if canonical(method).startswith(_ON_TOP) else names
    return list(dict.fromkeys(_papers()[name] for name in names if name in _papers()))


def family(method: str) -> str:
    """The folder of everfed.methods in which what is particular to a method lies."""
    name = canonical(method)
    found = preset(name)
    part = "fedgp" if name.startswith(_ON_TOP) or found is None else found.parts[-1]
    return PARTS[part].partition(".")[0] if part in PARTS else "own"
