"""The colours of a page, on light and on dark ground; methods have --s0, --s1, ..."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterable

# Similar hues twice, darker for light ground, lighter for dark ground. A search made the least distance of two of them
# (OKLab) large, for readers with red-green blindness, too; tests/reports/test_groups.py holds that distance.
ON_LIGHT = (
    *("#526ffb", "#d42130", "#0c7219", "#bf5fc9", "#bd7c31"),
    *("#2d918e", "#920864", "#241bc5", "#6e3616", "#08629c"),
)
ON_DARK = (
    *("#167afa", "#ee092f", "#91d54e", "#c136ce", "#f8d193"),
    *("#089772", "#ef90ae", "#a193fc", "#dd9314", "#89d7f9"),
)
LIGHT = {
    "ground": "#ffffff",
    "text": "#1b1f24",
    "soft": "#57606a",
    "rule": "#d8dde3",
    "panel": "#f3f5f8",
    "accent": "#1764ab",
    "bad": "#b3261e",
    "good": "#0b7a53",
    "heat": "#5aa0e0",
    "task-light": "0.66",
    "task-strong": "0.14",
}
DARK = {
    "ground": "#15181d",
    "text": "#e6e9ed",
    "soft": "#9aa4b0",
    "rule": "#323841",
    "panel": "#1e2229",
    "accent": "#6cb2f5",
    "bad": "#f58a82",
    "good": "#4fc99a",
    "heat": "#1a66ad",
    "task-light": "0.7",
    "task-strong": "0.13",
}


# Kinds of pieces in bars (parts, phases): dull, so that none of them looks like a method.
PIECES = 16
_LIGHTNESS = {"light": (0.56, 0.74), "dark": (0.68, 0.48)}


def _piece(scheme: str, index: int) -> str:
    return f"oklch({_LIGHTNESS[scheme][index % 2]} 0.05 {(20 + 67.5 * index) % 360:g})"


def variables() -> str:
    """CSS: the variables of the theme that the system or the reader (data-theme) chose."""
    light, dark = _block("light", LIGHT, ON_LIGHT), _block("dark", DARK, ON_DARK)
    by_system = f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
    return f":root{{{light}}}\n{by_system}\n:root[data-theme=dark]{{{dark}}}\n"


def _block(scheme: str, page: dict[str, str], methods: tuple[str, ...]) -> str:
    named = {**page, **{f"s{i}": colour for i, colour in enumerate(methods)}}
    named |= {f"p{i}": _piece(scheme, i) for i in range(PIECES)}
    return f"color-scheme:{scheme};" + "".join(f"--{name}:{value};" for name, value in named.items())


COLOURS = len(ON_LIGHT)


class Colours:
    """The colour of each method, and the dash of each of its variants on a stream. Both stay once assigned, and a
    method prefers the same colour everywhere."""

    def __init__(self) -> None:
        self._methods: dict[str, int] = {}
        self._variants: dict[tuple[str, str, str], int] = {}

    def assign(self, named: Iterable[tuple[str, str, str]]) -> None:
        """Of (method, stream, experiment)s, in their order."""
        for method, stream, which in named:
            if method not in self._methods:
                self._methods[method] = self._free(zlib.crc32(method.encode()) % COLOURS)
            if (method, stream, which) not in self._variants:
                self._variants[method, stream, which] = self._dashed(self._methods[method], stream)

    def of(self, method: str, stream: str = "", which: str = "") -> int:
        """0, 1, ...: the colour is the rest of a division by COLOURS, the dash the quotient."""
        self.assign([(method, stream, which)])
        return self._variants[method, stream, which]

    def _dashed(self, colour: int, stream: str) -> int:
        """The colour with the first dash that it does not have on this stream yet."""
        taken = {number for (_, own, _), number in self._variants.items() if own == stream}
        return next(number for number in itertools.count(colour, COLOURS) if number not in taken)

    def _free(self, wish: int) -> int:
        """The wished colour, or the next of those that the fewest methods have."""
        uses = Counter(self._methods.values())
        return min(((wish + i) % COLOURS for i in range(COLOURS)), key=lambda colour: uses[colour])
