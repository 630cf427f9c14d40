"""How numbers and tables are written as text, and HTML as nested function calls.

Every text and attribute of HTML is escaped, so nothing in a run can become markup.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape


def percent(fraction: float, digits: int = 2) -> str:
    """0.4535 -> "45.35"; the sign % belongs in the heading."""
    return f"{100 * fraction:z.{digits}f}"


def with_deviation(mean: float, deviation: float, plus_minus: str = " ± ", most: int = 2) -> str:
    """As "58.6 ± 5.5": two significant digits of the deviation, as many decimals of the mean, at most `most`."""
    decimals = most
    if deviation > 0:
        decimals = min(most, max(0, 1 - int(f"{deviation:.1e}".partition("e")[2])))
    return f"{mean:z.{decimals}f}{plus_minus}{deviation:.{decimals}f}"


def size(count: float) -> str:
    """Bytes in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.95:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def clock(seconds: float) -> str:
    """M:SS, or H:MM:SS from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """With its unit: below a minute in seconds, else as `clock`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return f"{clock(seconds)} {'h' if round(seconds) >= 3600 else 'min'}"


def count(value: float) -> str:
    """1234567 -> "1,234,567"."""
    return f"{value:,.0f}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """As "a, b and c"; of more than `most` the first ones and how many more there are."""
    shown = [*names] if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else ""


def moment(seconds: float) -> str:
    """A time since the epoch as UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, so that it reads as plain text, too."""
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(columns))]
    head, *body = ("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *body])


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV."""
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(rows)
    return lines.getvalue()


# HTML --------------------------------------------------------------------------------------------------------------
_VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta"})


class Html(str):
    """Text that is already markup."""

    __slots__ = ()


Child = Html | str | int | float | None
NOTHING = Html("")


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """<name ...>children</name>. Attributes: `class_` is class, `aria_label` is aria-label; None and False leave an
    attribute out, True writes it without a value. Children of None are left out."""
    opening = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    return Html(opening if name in _VOID else f"{opening}{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Children one after the other."""
    return Html(
        "".join(child if isinstance(child, Html) else escape(str(child)) for child in children if child is not None)
    )


def _attribute(key: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
