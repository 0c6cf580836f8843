"""A journal as kills, power cuts and a process that does not know that it is over leave it."""

from __future__ import annotations

import random
from pathlib import Path

from loop_dagster.models.journal import Journal

HEADER = {"what": 1}


def test_a_torn_line_anywhere_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    rows = [{"n": number, "text": "ü\n" * number} for number in range(8)]
    with Journal(path, HEADER) as journal:
        for row in rows:
            journal.append(row)
    whole = path.read_bytes()
    lines = whole.split(b"\n")
    rng = random.Random(5)
    for _ in range(100):
        torn = rng.randrange(1, 9)
        bad = rng.choice(
            [b"", b"\x00" * 20, lines[torn][: rng.randrange(1, len(lines[torn]))], b"\xff\xfe", b"[1]", b"7"]
        )
        path.write_bytes(b"\n".join([*lines[:torn], bad, *lines[torn + 1 :]]))
        with Journal(path, HEADER) as journal:
            assert journal.rows == [row for row in rows if row["n"] != torn - 1]
            journal.append({"n": 99})
        with Journal(path, HEADER) as journal:
            assert journal.rows[-1] == {"n": 99} and len(journal.rows) == 8


def test_two_processes_tear_none_of_each_others_rows(tmp_path: Path) -> None:
    """One that lost its step goes on writing until it notices."""
    path = tmp_path / "journal"
    with Journal(path, HEADER) as old, Journal(path, HEADER) as new:
        for number in range(50):
            old.append({"old": number})
            new.append({"new": number, "text": "x" * 20_000})
    with Journal(path, HEADER) as journal:
        assert [row["old"] for row in journal.rows if "old" in row] == list(range(50))
        assert [row["new"] for row in journal.rows if "new" in row] == list(range(50))
