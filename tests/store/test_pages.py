"""A captured conversation and an imported one are the same sample."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from loop_dagster.rules import canonical
from loop_dagster.rules.retention import captured_until
from loop_dagster.rules.shapes import Parsed, parse
from loop_dagster.store.importing import import_file
from loop_dagster.store.lake import Lake
from loop_dagster.store.pages import Decoded, Input, Options, decode_page, sample_row
from loop_dagster.tables import SAMPLES

CASES = Path(__file__).parent.parent / "cases"
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SAME = ["messages", "answer", "tools", "text_key", "prompt_key", "answer_key", "bytes", "flag"]


def test_a_captured_row_has_the_texts_and_keys_of_an_imported_one(tmp_path: Path) -> None:
    for name in ("tool_arguments.jsonl", "secrets.jsonl", "clean.jsonl"):
        lake = Lake(str(tmp_path / name))
        import_file(CASES / name, lake, source="shop", now=NOW)
        imported = lake.scan(SAMPLES).collect().sort("position")
        rows: list[dict[str, object]] = []
        for line in (CASES / name).read_bytes().splitlines():
            parsed = parse(canonical.loads(line))
            assert isinstance(parsed, Parsed)
            row, counts = sample_row(
                source="shop",
                identity=canonical.identity("request", "shop", str(len(rows))),
                messages=parsed.messages,
                answer=parsed.answer,
                tools=parsed.tools,
                flag=parsed.flag,
                now=NOW,
                expires_at=captured_until(NOW),
            )
            assert sum(counts.values()) == (6 if name == "secrets.jsonl" else 0)
            rows.append(row)
        assert SAMPLES.frame(rows).select(SAME).equals(imported.select(SAME))


def test_a_decoded_page_shows_nothing_of_its_rows() -> None:
    line = b'{"messages": [{"role": "user", "content": "pat@example.org"}, {"role": "assistant", "content": "x"}]}'
    decoded = decode_page([Input(0, 1, line)], Options("shop", "i", NOW))
    assert isinstance(decoded, Decoded)
    assert "pat@" not in repr(decoded)
