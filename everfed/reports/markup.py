"""HTML as nested function calls; every text and attribute is escaped, so nothing in a run can become markup."""

from __future__ import annotations

from html import escape

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
