"""Lines with time and level, alike in the console of `everfed serve` and `everfed join` and in the log files."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

FORMAT, TIME = "%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"


def stamped(text: str, level: int = logging.INFO) -> str:
    """The line with this moment and its level in front."""
    return f"{time.strftime(TIME)} {logging.getLevelName(level)} {text}"


def stamped_event(line: str, event: Mapping[str, Any]) -> str:
    """The line of a run's event; what a client failed at is a warning."""
    trouble = event["event"] == "warning" or (event["event"] == "client" and event["kind"] != "connected")
    return stamped(line, logging.WARNING if trouble else logging.INFO)


def log_to_stderr() -> None:
    """Write the log of this process to standard error: its log file. `everfed join` prints the worker's, too."""
    logger, handler = logging.getLogger("everfed"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT, TIME))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
