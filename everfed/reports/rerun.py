"""The command that repeats a run."""

from __future__ import annotations

import shlex

from everfed.reports.read import LoggedRun


def command(run: LoggedRun) -> str:
    """The exact command line; the stored recipe holds the seed and every default."""
    words = ["everfed", "run", str(run.folder / "recipe.toml"), "--out", f"{run.folder}-again"]
    scale, data = run.settings.get("scale", 1.0), run.settings.get("data_dir")
    if scale != 1.0:
        words += ["--scale", f"{scale!r}"]
    if data:
        words += ["--data", str(data)]
    return shlex.join(words)


def own_stream(run: LoggedRun) -> bool:
    """Did the run get its stream from Python, so that no command repeats it?"""
    return bool(run.settings.get("own_stream"))
