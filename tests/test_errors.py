"""Errors that need no traceback, passed on from one process to another."""

from __future__ import annotations

import errno
import json

import pytest

from everfed.core.events import Diverged
from everfed.errors import (
    CompositionError,
    DataError,
    RecipeError,
    UserError,
    exit_code,
    from_note,
    is_user_error,
    note_of,
)
from everfed.streams.options import OptionError


@pytest.mark.parametrize(
    "error",
    [
        DataError("no such file"),
        OptionError("classes", "expected a number"),
        CompositionError("two parts aggregate"),
        RecipeError("no method"),
        Diverged("the loss is not finite"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_as_it_was(error: Exception) -> None:
    again = from_note(json.loads(json.dumps(note_of(error))))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert exit_code(again) == exit_code(error)


def test_a_kind_that_is_not_found_is_a_users_error_still() -> None:
    class Local(UserError):
        pass

    again = from_note(note_of(Local("say it otherwise")) or {})
    assert (type(again), str(again), is_user_error(again)) == (UserError, "say it otherwise", True)


def test_a_bug_keeps_its_traceback() -> None:
    assert note_of(RuntimeError("shapes do not match")) is None


def test_a_place_that_a_worker_cannot_write_arrives_as_the_users_error() -> None:
    note = note_of(PermissionError(errno.EACCES, "Permission denied", "runs/x"))
    again = from_note(json.loads(json.dumps(note)))
    assert exit_code(again) == 2 and str(again) == "runs/x: Permission denied"
