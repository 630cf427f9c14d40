"""Options, declared once: default, bounds and meaning. The declaration makes the field, its check, the error, the line
in `everfed show`, the row in the method's document and the recipe's schema.

    @dataclass(frozen=True)
    class FedProx(Part):
        mu: float = option(0.01, at_least=0, about="weight of (mu/2) ||w - w_global||^2")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

_KEY = "everfed.option"


@dataclass(frozen=True)
class Option:
    """What an option may be. A value of None stands for a default that is chosen later, and is not checked."""

    about: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    one_of: tuple[Any, ...] = ()

    def problem(self, value: Any) -> str:
        """Why this value is refused; "" if it is not."""
        if self.one_of:
            wrong = f"must be one of {', '.join(map(str, self.one_of))}" if value not in self.one_of else ""
        elif value is None:
            return ""
        elif self.at_least is not None and not value >= self.at_least:
            wrong = f"must be at least {self.at_least:g}"
        elif self.above is not None and not value > self.above:
            wrong = "must be positive" if self.above == 0 else f"must be above {self.above:g}"
        elif self.at_most is not None and not value <= self.at_most:
            wrong = f"must be at most {self.at_most:g}"
        elif self.below is not None and not value < self.below:
            wrong = f"must be below {self.below:g}"
        else:
            return ""
        return wrong and f"{wrong}; got {value!r}"

    @property
    def allowed(self) -> str:
        """The allowed values in words, for `show` and the documents; "" where all are."""
        if self.one_of:
            return f"one of {', '.join(map(str, self.one_of))}"
        bounds = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below))
        return ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def option(
    default: Any = MISSING,
    *,
    make: Callable[[], Any] | None = None,
    about: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    one_of: Sequence[Any] = (),
    hash: bool | None = None,
) -> Any:
    """A dataclass field with its bounds. make: makes the default, where it cannot be shared. hash: False for tables."""
    declared = Option(about, at_least, above, at_most, below, tuple(one_of))
    defaults: dict[str, Any] = {"default": default} if make is None else {"default_factory": make}
    return field(**defaults, hash=hash, metadata={_KEY: declared})


class HasOptions:
    """Base of dataclasses with options: what is out of bounds is refused when one is made. Lists become tuples.
    option_prefix: what its options' names begin with in an error."""

    option_prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            declared = entry.metadata.get(_KEY)
            if declared is None:
                continue
            if isinstance(getattr(self, entry.name), list):
                object.__setattr__(self, entry.name, tuple(getattr(self, entry.name)))
            problem = declared.problem(getattr(self, entry.name))
            if problem:
                raise ValueError(f"{self.option_prefix}{entry.name} {problem}")


def declared_options(kind: type) -> Iterator[tuple[str, Option]]:
    """The options of a dataclass by name; a plain field is one without bounds."""
    for entry in fields(kind):
        yield entry.name, entry.metadata.get(_KEY, Option())
