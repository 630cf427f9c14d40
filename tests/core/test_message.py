"""What a message costs: every tensor by its size, and each version of a `Cached` payload once per client."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.core.message import (
    Cached,
    PerClient,
    Traffic,
    addressed,
    common,
    own,
    payload_bytes,
    unwrap,
    versions,
    with_own,
)

MESSAGE = {
    "model": {"params": Cached(3, torch.zeros(10)), "counters": Cached(3, torch.zeros(2, dtype=torch.int64))},
    "gan": {"net": Cached("v1", {"a": torch.zeros(5), "deep": {"b": torch.zeros(7, dtype=torch.uint8)}}), "on": True},
    "gp": {"reference": torch.zeros(10)},
}


def test_bytes_by_part_for_a_client_that_holds_nothing() -> None:
    assert payload_bytes(MESSAGE, {}) == {"model": 40 + 16, "gan": 20 + 7, "gp": 40}


def test_held_versions_are_not_sent_again_and_others_are() -> None:
    held = versions(MESSAGE)
    assert held == {"model/params": 3, "model/counters": 3, "gan/net": "v1"}
    assert payload_bytes(MESSAGE, held) == {"model": 0, "gan": 0, "gp": 40}
    assert payload_bytes(MESSAGE, {**held, "model/params": 2}) == {"model": 40, "gan": 0, "gp": 40}
    assert payload_bytes(MESSAGE, {"gan/net": 1}) == {"model": 56, "gan": 27, "gp": 40}


def test_a_version_is_held_by_key_not_by_part() -> None:
    assert payload_bytes({"a": {"x": Cached(1, torch.zeros(1)), "y": Cached(1, torch.zeros(1))}}, {"a/x": 1}) == {
        "a": 4
    }


def test_parts_read_payloads_not_wrappers() -> None:
    plain = unwrap(MESSAGE)
    assert plain["model"]["params"] is MESSAGE["model"]["params"].value
    assert plain["gan"]["on"] is True and plain["gp"]["reference"].shape == (10,)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans()), max_size=12))
def test_traffic_adds_up_by_part_and_direction(log: list[tuple[str, int, bool]]) -> None:
    traffic = Traffic()
    for part, size, up in log:
        if up:
            traffic.received({part: {"x": torch.zeros(size)}})
        else:
            traffic.sent({part: 4 * size})
    totals = traffic.as_dict()
    assert totals["bytes_up"] == sum(4 * size for _, size, up in log if up)
    assert totals["bytes_down"] == sum(4 * size for _, size, up in log if not up)
    for part, both in totals["bytes_by_part"].items():
        assert both == {
            "up": sum(4 * size for p, size, up in log if p == part and up),
            "down": sum(4 * size for p, size, up in log if p == part and not up),
        }


def test_scalars_are_free() -> None:
    traffic = Traffic()
    traffic.received({"a": {"n": 3, "s": "text"}})
    assert traffic.as_dict() == {"bytes_up": 0, "bytes_down": 0, "bytes_by_part": {}}


def test_each_client_receives_its_own_payload_and_nobody_elses() -> None:
    letters = PerClient({0: {"a": torch.zeros(2)}, 2: {"b": torch.zeros(3)}})
    message = {"secure": {"letters": letters, "round": 1}, "gp": {"reference": torch.zeros(10)}}
    assert addressed(message, 0)["secure"] == {"letters": letters.values[0], "round": 1}
    assert addressed(message, 1)["secure"] == {"round": 1}
    assert payload_bytes(addressed(message, 2), {}) == {"secure": 12, "gp": 40}
    for client in range(3):
        assert with_own(common(message), own(message, client)) == addressed(message, client)
    assert own(message, 1) == {} and own(message, 0) == {"secure": {"letters": letters.values[0]}}
