"""The colours of a page, on light and on dark ground; methods have --s0, --s1, ..."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

# The same hues twice: darker for light ground, lighter for dark ground.
ON_LIGHT = (
    *("#1764ab", "#b35900", "#0b7a53", "#b3246b", "#6a4bbf"),
    *("#00788a", "#8a5a2b", "#b3261e", "#5f6b00", "#56616e"),
)
ON_DARK = (
    *("#6cb2f5", "#f5a04b", "#4fc99a", "#f07ab5", "#ab97f0"),
    *("#4cc5d6", "#cfa06d", "#f58a82", "#b9c644", "#a9b4c0"),
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
    "heat": "#0b5aa6",
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
    "heat": "#4aa3f0",
    "task-light": "0.7",
    "task-strong": "0.13",
}


# Kinds of pieces in bars (parts, phases): dull, so that none of them looks like a method.
PIECES = 16
_LIGHTNESS = {"light": (0.56, 0.74), "dark": (0.68, 0.48)}


def _piece(scheme: str, index: int) -> str:
    return f"oklch({_LIGHTNESS[scheme][index % 2]} 0.05 {(20 + 67.5 * index) % 360:g})"


@lru_cache(maxsize=101)
def on_heat(percent: int) -> tuple[str, str]:
    """Black or white, whichever can be read on a cell of that heat, in the light and in the dark theme. One of the two
    always has a contrast of 4.58 or more."""
    grounds = (mixed(theme["heat"], theme["panel"], percent / 100) for theme in (LIGHT, DARK))
    light, dark = ("#fff" if luminance(ground) < 0.179 else "#000" for ground in grounds)
    return light, dark


def mixed(one: str, other: str, share: float) -> tuple[float, ...]:
    """As CSS does it: color-mix(in oklab, one share, other), in linear RGB."""
    a, b = _oklab(_linear(one)), _oklab(_linear(other))
    long, medium, short = _times(_FROM_OKLAB, [share * x + (1 - share) * y for x, y in zip(a, b, strict=True)])
    return tuple(min(max(value, 0.0), 1.0) for value in _times(_FROM_LMS, [long**3, medium**3, short**3]))


def luminance(linear: Sequence[float]) -> float:
    """The relative luminance of WCAG 2."""
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _linear(colour: str) -> list[float]:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]


# Oklab (Ottosson, 2020): linear RGB -> cones -> cube roots -> lightness and two axes of colour, and back.
_TO_LMS = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
_TO_OKLAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)
_FROM_OKLAB = ((1, 0.3963377774, 0.2158037573), (1, -0.1055613458, -0.0638541728), (1, -0.0894841775, -1.2914855480))
_FROM_LMS = (
    (4.0767416621, -3.3077115913, 0.2309699292),
    (-1.2684380046, 2.6097574011, -0.3413193965),
    (-0.0041960863, -0.7034186147, 1.7076147010),
)


def _oklab(linear: Sequence[float]) -> list[float]:
    return _times(_TO_OKLAB, [value ** (1 / 3) for value in _times(_TO_LMS, linear)])


def _times(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def variables() -> str:
    """CSS: the variables of the theme that the system or the reader (data-theme) chose."""
    light, dark = _block("light", LIGHT, ON_LIGHT), _block("dark", DARK, ON_DARK)
    by_system = f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
    return f":root{{{light}}}\n{by_system}\n:root[data-theme=dark]{{{dark}}}\n"


def _block(scheme: str, page: dict[str, str], methods: tuple[str, ...]) -> str:
    named = {**page, **{f"s{i}": colour for i, colour in enumerate(methods)}}
    named |= {f"p{i}": _piece(scheme, i) for i in range(PIECES)}
    return f"color-scheme:{scheme};" + "".join(f"--{name}:{value};" for name, value in named.items())
