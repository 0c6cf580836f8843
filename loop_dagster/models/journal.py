"""An append-only JSONL file that a killed process can go on from.

Belongs here: writing and reading back such a file. Does not belong here: what the rows mean, or where the finished
file goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

Row = Mapping[str, Any]


class Journal:
    """Rows appended to `path` one by one, after a first line that says what they belong to.

    Opening it reads what is there: a last line that a kill cut short is taken off, a line that is torn in any other way
    is passed over (each row stands for itself), and a file whose first line differs from `header` belongs to other work
    and is started anew. A row is with the operating system when `append` returns, so it survives the process but not a
    power cut. Every row is appended whole, so that a process which does not know yet that it lost its step tears none.
    """

    def __init__(self, path: Path, header: Row) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        first = orjson.dumps(dict(header), option=orjson.OPT_SORT_KEYS)
        whole = self._read(first)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if whole else "wb") as file:
            file.truncate(whole)
        self._file = path.open("ab")
        if not whole:
            self._write(first)

    def _read(self, first: bytes) -> int:
        """Fill `rows`; the length in bytes of the part that can be kept, 0 when nothing can."""
        if not self.path.exists():
            return 0
        kept = 0
        for number, line in enumerate(self.path.read_bytes().split(b"\n")[:-1]):
            if number == 0 and line != first:
                break
            kept += len(line) + 1
            if number and (row := _row(line)) is not None:
                self.rows.append(row)
        return kept

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()

    def append(self, row: Row) -> None:
        row = dict(row)
        self._write(orjson.dumps(row))
        self.rows.append(row)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
