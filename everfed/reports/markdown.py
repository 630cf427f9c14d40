"""Markdown tables whose columns are aligned, so that they read as plain text, too."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(columns))]
    head, *body = ("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *body])
