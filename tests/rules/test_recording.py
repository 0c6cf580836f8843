"""The share of a source that is recorded: whole conversations, the same ones each time, about as many as asked for."""

from __future__ import annotations

from loop_dagster.rules.recording import is_kept

#: As it was when sources were first recorded by share; a change would split conversations that are under way.
EXPECTED = "101011010100"
CONVERSATIONS = [f"conversation {number}" for number in range(4_000)]


def test_everything_and_nothing() -> None:
    assert all(is_kept("source", one, 1.0) for one in CONVERSATIONS)
    assert not any(is_kept("source", one, 0.0) for one in CONVERSATIONS)


def test_a_larger_share_keeps_what_a_smaller_one_kept() -> None:
    kept = [{one for one in CONVERSATIONS if is_kept("source", one, rate)} for rate in (0.1, 0.5, 0.9)]
    assert kept[0] < kept[1] < kept[2]
    for share, found in zip((0.1, 0.5, 0.9), kept, strict=True):
        assert abs(len(found) / len(CONVERSATIONS) - share) < 0.03


def test_sources_choose_apart() -> None:
    one, other = ({name for name in CONVERSATIONS if is_kept(source, name, 0.5)} for source in ("one", "other"))
    assert 0.4 < len(one & other) / len(one) < 0.6


def test_it_is_the_same_on_every_machine() -> None:
    assert "".join("01"[is_kept("web", f"c{number}", 0.5)] for number in range(12)) == EXPECTED
