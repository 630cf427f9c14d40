"""`everfed doctor`: installed packages, device, and data sets that were found."""

from __future__ import annotations

import json
import os
import platform
import re
from importlib import metadata, util
from pathlib import Path
from typing import Annotated

import typer

from everfed.commands import options
from everfed.commands.output import show_table
from everfed.errors import UserError

Findings = list[tuple[str, str]]
# extras that are not for users
_FOR_DEVELOPMENT = ("dev", "docs", "all")
_IMPORTED_AS = {"pillow": "PIL", "mlflow-skinny": "mlflow"}


def doctor(
    data: options.Data = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Test whether several workers can share this folder of runs.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show versions, the device, the cores, the extras that are installed and the data sets that were found.

    \b
    Examples:
      everfed doctor --data ~/data
      everfed doctor --folder /shared/runs
    """
    findings = [*_software(), *_hardware(), *_locks(folder), *_extras(), *_data(data)]
    if as_json:
        typer.echo(json.dumps(dict(findings), indent=2))
    else:
        show_table(["what", "found"], findings)


def _software() -> Findings:
    import torch

    import everfed

    return [("everfed", everfed.__version__), ("python", platform.python_version()), ("torch", torch.__version__)]


def _hardware() -> Findings:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        ("device", ", ".join(gpus) or f"cpu ({platform.machine()}); no CUDA device"),
        ("cores", str(cores)),
        ("threads", f"{torch.get_num_threads()} per operation; runs use 1, which makes them exact"),
    ]


def _locks(folder: Path | None) -> Findings:
    if folder is None:
        return []
    from everfed.store.shared_disk import lock_report

    if not folder.is_dir():
        raise UserError(f"--folder {folder} is not a folder")
    return [(f"locks in {folder}", lock_report(folder))]


def _extras() -> Findings:
    """Each extra with the packages it still lacks."""
    findings = []
    for extra, packages in sorted(_packages_by_extra().items()):
        missing = [name for name in packages if util.find_spec(_IMPORTED_AS.get(name, name.replace("-", "_"))) is None]
        state = f"missing {', '.join(missing)}: pip install 'everfed[{extra}]'" if missing else "installed"
        findings.append((f"extra {extra}", state))
    return findings


def _packages_by_extra() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in metadata.requires("everfed") or ():
        requirement = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", line)
        if requirement and requirement[2] not in _FOR_DEVELOPMENT:
            found.setdefault(requirement[2], []).append(requirement[1])
    return found


def _data(folder: options.Data) -> Findings:
    from everfed.data.available import available
    from everfed.data.sources import data_folder

    where = data_folder(folder)
    named = str(where) if where else "none named; use --data or EVERFED_DATA"
    if where and not where.is_dir():
        named = f"{where} does not exist"
    sets = [(f"data set {name}", place if found else "not found") for name, found, place in available(folder)]
    return [("data folder", named), *sets]
