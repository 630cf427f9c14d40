"""The colours of a page, on light and on dark ground; methods have --s0, --s1, ..."""

from __future__ import annotations

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
    "on-heat": "#ffffff",
    "task-light": "0.66",
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
    "on-heat": "#06131f",
    "task-light": "0.7",
}


def variables() -> str:
    """CSS: the variables of the theme that the system or the reader (data-theme) chose."""
    light, dark = _block("light", LIGHT, ON_LIGHT), _block("dark", DARK, ON_DARK)
    by_system = f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
    return f":root{{{light}}}\n{by_system}\n:root[data-theme=dark]{{{dark}}}\n"


def _block(scheme: str, page: dict[str, str], methods: tuple[str, ...]) -> str:
    named = {**page, **{f"s{i}": colour for i, colour in enumerate(methods)}}
    return f"color-scheme:{scheme};" + "".join(f"--{name}:{value};" for name, value in named.items())
