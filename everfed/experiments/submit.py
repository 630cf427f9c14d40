"""Identical workers for one table: a script for Slurm, Kubernetes or this machine, made from a template.

A worker is the command of the table itself. Workers share its folder: each takes runs that no other holds, as several
processes on one machine do, so a worker may come, go or be restarted at any time.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from everfed.errors import UserError
from everfed.store.files import make_folder, write_atomic

_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")


@dataclass(frozen=True)
class System:
    """Where workers run. template: beside this file. submit: the program that takes the script. everfed: how a worker
    starts it."""

    template: str
    submit: tuple[str, ...]
    everfed: tuple[str, ...] = (sys.executable, "-m", "everfed")


SYSTEMS = {
    "slurm": System("slurm.sbatch", ("sbatch",)),
    "kubernetes": System("kubernetes.yaml", ("kubectl", "create", "-f"), ("everfed",)),
    "local": System("local.sh", ("bash",)),
}


class SubmissionError(UserError):
    """A script that cannot be made or submitted."""


def template_of(system: str) -> str:
    """The text of the template that is shipped."""
    place = resources.files("everfed.experiments") / "templates" / SYSTEMS[system].template
    return place.read_text(encoding="utf-8")


def write_script(
    system: str, command: Sequence[str], folder: Path, workers: int, *, template: str | None = None, here: Path
) -> Path:
    """Write FOLDER/submit/ and return the script. command: of the table, as after `everfed`. folder: of its runs.
    template: a text of the site's own. here: the folder in which the command is right."""
    place = folder / "submit"
    make_folder(place)
    command = [*SYSTEMS[system].everfed, *command]
    values = {
        "WORKERS": str(workers),
        "NAME": re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "table",
        "COMMAND": shlex.join(command),
        "COMMAND_AS_LIST": json.dumps(command),
        "HERE": shlex.quote(str(here)),
        "LOGS": shlex.quote(str(place.absolute())),
    }
    text = template_of(system) if template is None else template
    if unknown := set(_PLACEHOLDER.findall(text)) - values.keys():
        allowed = ", ".join(f"@{name}@" for name in values)
        raise SubmissionError(f"the template has @{min(unknown)}@, which stands for nothing; allowed: {allowed}")
    script = place / SYSTEMS[system].template
    write_atomic(script, _PLACEHOLDER.sub(lambda found: values[found[1]], text).encode())
    return script


def submit(system: str, script: Path) -> int:
    """Hand the script over and return the exit code of the program that takes it. On this machine that is when all
    workers have ended."""
    program = [*SYSTEMS[system].submit, str(script)]
    if shutil.which(program[0]) is None:
        raise SubmissionError(f"{program[0]} is not installed here; where it is, run: {shlex.join(program)}")
    return subprocess.run(program, check=False).returncode
