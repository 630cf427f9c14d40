"""Names that come from outside cannot mean places."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.federation.names import NameRefused, check_name, is_name


@pytest.mark.parametrize("name", ["a", "site-a", "Site_1.ward.2", "0", "x" * 64, "a-", "a_"])
def test_plain_names_pass(name: str) -> None:
    assert check_name("the client", name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a/b", "a\\b", "C:", "C:x", "~", "-rf", ".hidden", "a.", "a..b",
     " a", "a ", "a\n", "a\0b", "$(x)", "`x`", "a;b", "%2e%2e", "ä", "\u202e", "x" * 65, "con", "NUL", "com1.txt",
     "a\x1b[2J", None, 5, b"a", ["a"]],
)  # fmt: skip
def test_everything_else_is_refused_and_shown_safely(name: object) -> None:
    assert not is_name(name)
    with pytest.raises(NameRefused, match="the client: .* is not a name") as caught:
        check_name("the client", name)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Z", "C"]), max_size=70))
@settings(max_examples=500)
def test_a_name_is_one_step_into_a_folder(name: str) -> None:
    if is_name(name):
        base = Path("/srv/federation")
        assert (base / name).resolve().parent == base and (base / name).name == name
