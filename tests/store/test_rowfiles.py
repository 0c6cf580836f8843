"""Rows out of files: lines, arrays, blocks, line numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loop_dagster.store import rowfiles
from loop_dagster.store.rowfiles import CUT_OFF, file_digest, read_rows


def rows_of(path: Path) -> list[tuple[int, bytes | None]]:
    return [(row.line, row.data) for rows, _ in read_rows(path) for row in rows]


def written(folder: Path, content: bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(content)
    return path


@pytest.fixture(params=[1, 3, 7, 64, 4 << 20])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(rowfiles, "BLOCK_BYTES", request.param)
    return int(request.param)


def test_lines_keep_the_numbers_of_the_file(tmp_path: Path, small_blocks: int) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"b": "\xe2\x80\xa8"}\n\n{"c": 3}'
    assert small_blocks
    found = rows_of(written(tmp_path, content))
    assert [(line, data and data.strip()) for line, data in found] == [
        (1, b'{"a": 1}'),
        (4, b'{"b": "\xe2\x80\xa8"}'),
        (6, b'{"c": 3}'),
    ]


def test_an_array_is_cut_into_its_elements(tmp_path: Path, small_blocks: int) -> None:
    assert small_blocks
    content = rb"""[ {"a": "x,]}\"[\\"},
 [1, {"b": []}] ,
   "text, text",

 {broken}
 , 7 ]
"""
    assert rows_of(written(tmp_path, content)) == [
        (1, rb'{"a": "x,]}\"[\\"}'),
        (2, b'[1, {"b": []}]'),
        (3, b'"text, text"'),
        (5, b"{broken}"),
        (6, b"7"),
    ]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", []),
        (b"\n\n", []),
        (b"[]", []),
        (b" [ ] \n", []),
        (b'[{"a": 1}', [(1, b'{"a": 1}'), (1, CUT_OFF)]),
        (b'[{"a": 1}, {"b": "cut', [(1, b'{"a": 1}'), (1, b'{"b": "cut'), (1, CUT_OFF)]),
        (b'[{"a": 1}]\n trailing', [(1, b'{"a": 1}'), (2, b"trailing")]),
        (b'[{"a": 1},\n]', [(1, b'{"a": 1}')]),
    ],
)
def test_odd_files(tmp_path: Path, content: bytes, found: list[tuple[int, bytes]]) -> None:
    assert rows_of(written(tmp_path, content)) == found


def test_a_row_over_the_limit_is_left_out_and_lines_after_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowfiles, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(rowfiles, "BLOCK_BYTES", 16)
    long = b'{"a": "' + b"x" * 500 + b'"}'
    assert rows_of(written(tmp_path, b"1\n" + long + b"\n2\n" + long)) == [(1, b"1"), (2, None), (3, b"2"), (4, None)]
    assert rows_of(written(tmp_path, b"[1,\n" + long + b",\n2]")) == [(1, b"1"), (2, None)]
    monkeypatch.setattr(rowfiles, "BLOCK_BYTES", 4096)
    assert rows_of(written(tmp_path, b"1\n" + long + b"\n2\n" + long)) == [(1, b"1"), (2, None), (3, b"2"), (4, None)]


VALUES = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=8), st.integers(1, 40), st.sampled_from([None, 1]))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_and_arrays_give_the_same_rows(
    tmp_path: Path, values: list[object], block: int, indent: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rowfiles, "BLOCK_BYTES", block)
        array = rows_of(written(tmp_path, b"[" + json.dumps(values, indent=indent).encode()[1:]))
        lines = rows_of(written(tmp_path, b"{}\n" + b"\n".join(json.dumps(value).encode() for value in values)))[1:]
    assert [json.loads(data or b"") for _, data in array] == values
    assert [json.loads(data or b"") for _, data in lines] == values


def test_mark_line_ends_and_space_at_the_end_do_not_change_the_digest(tmp_path: Path, small_blocks: int) -> None:
    assert small_blocks
    one = file_digest(written(tmp_path, b'{"a": 1}\n{"b": 2}\n'), "s")
    assert file_digest(written(tmp_path, b'{"a": 1}\r\n{"b": 2}'), "s") == one
    assert file_digest(written(tmp_path, b'{"a": 1}\n{"b": 2}\n\n \n'), "s") == one
    assert file_digest(written(tmp_path, b'\xef\xbb\xbf{"a": 1}\n{"b": 2}'), "s") == one
    assert file_digest(written(tmp_path, b'{"a": 1}\n{"b": 3}\n'), "s") != one
    assert file_digest(written(tmp_path, b'{"a": 1}\n{"b": 2}\n'), "t") != one
