"""Files of rows, read in blocks: JSONL, or one JSON array.

Belongs here: bytes in, one piece of bytes per row out, with the line of the file on which the row begins. Does not
belong here: decoding a row or knowing what it means. Memory is bounded by the block and by the largest row allowed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple

import xxhash

BLOCK_BYTES: Final = 4 * 1024 * 1024
#: A longer row is left out: no chat is that long, and a file without line ends would otherwise be read whole.
MAX_ROW_BYTES: Final = 32 * 1024 * 1024
_BOM: Final = b"\xef\xbb\xbf"
_BLANK: Final = b" \t\r\n"
#: Strings whole, the signs that structure an array, and the quote of a string that the block cuts off.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},]|"', re.DOTALL)


class Form(NamedTuple):
    """A kind of file that holds no text in UTF-8: its first bytes, its name, and what makes text of it."""

    mark: bytes
    name: str
    mend: str


_FORMS: Final = (
    Form(codecs.BOM_UTF16_LE, "text in UTF-16", "iconv -f UTF-16 -t UTF-8"),
    Form(codecs.BOM_UTF16_BE, "text in UTF-16", "iconv -f UTF-16 -t UTF-8"),
    Form(b"\x1f\x8b", "compressed with gzip", "gunzip"),
    Form(b"\x28\xb5\x2f\xfd", "compressed with zstd", "unzstd"),
    Form(b"PK\x03\x04", "a ZIP archive", "unzip"),
    Form(b"PAR1", "Parquet", "Polars: read_parquet(...).write_ndjson(...)"),
)

#: Stands for the end of an array that has none.
CUT_OFF: Final = b""


class RawRow(NamedTuple):
    """One row as it stands in the file. `line` counts from 1; `data` is None for a row over MAX_ROW_BYTES, and CUT_OFF
    after the last row of an array that is not closed."""

    line: int
    data: bytes | None


def file_digest(path: Path, salt: str) -> str:
    """32 hex digits of the file's content; byte order mark, CR and white space at the end do not count."""
    digest = xxhash.xxh3_128(salt.encode("utf-8"))
    kept = b""
    with path.open("rb") as file:
        _pass_mark(file)
        while block := file.read(BLOCK_BYTES):
            block = kept + (block.replace(b"\r", b"") if b"\r" in block else block)
            body = block.rstrip(_BLANK)
            digest.update(body)
            kept = block[len(body) :][-BLOCK_BYTES:]
    return str(digest.hexdigest())


def other_form(path: Path) -> Form | None:
    """What the file is instead of text in UTF-8, by its first bytes; None for text."""
    with path.open("rb") as file:
        head = file.read(8)
    return next((form for form in _FORMS if head.startswith(form.mark)), None)


def read_rows(path: Path) -> Iterator[tuple[list[RawRow], int]]:
    """Rows in the file's order, some at a time, each time with the bytes of the file read so far.

    A file whose first sign is `[` is one JSON array, any other is JSONL; blank lines are passed over. A row over
    MAX_ROW_BYTES is passed over in JSONL; in an array it ends the reading.
    """
    with path.open("rb") as file:
        _pass_mark(file)
        head = file.read(BLOCK_BYTES)
        if head.lstrip(_BLANK).startswith(b"["):
            yield from _array(file, head)
        else:
            yield from _lines(file, head)


def _pass_mark(file: IO[bytes]) -> None:
    if file.read(len(_BOM)) != _BOM:
        file.seek(0)


def _lines(file: IO[bytes], head: bytes) -> Iterator[tuple[list[RawRow], int]]:
    line, carried, cut = 1, b"", False  # `cut`: the rest of a row that was too long is being passed over
    block = head
    while block:
        pieces = block.split(b"\n")
        pieces[0] = carried + pieces[0]
        carried = pieces.pop()
        rows: list[RawRow] = []
        if pieces and cut:
            del pieces[0]
            line, cut = line + 1, False
        for number, piece in enumerate(pieces, line):
            if len(piece) > MAX_ROW_BYTES:
                rows.append(RawRow(number, None))
            elif piece and not piece.isspace():
                rows.append(RawRow(number, piece))
        line += len(pieces)
        if len(carried) > MAX_ROW_BYTES:
            if not cut:
                rows.append(RawRow(line, None))
            carried, cut = b"", True
        yield rows, file.tell()
        block = file.read(BLOCK_BYTES)
    if carried.strip() and not cut:
        yield [RawRow(line, carried)], file.tell()


class _ArraySplitter:
    """Cuts the elements out of one JSON array, block after block, without decoding them."""

    def __init__(self) -> None:
        self._buffer = b""
        self._at = 0  # scanned up to here
        self._depth = 0  # 1 inside the outer array
        self._element = 0  # where the present element begins
        self._line = 1  # of `_counted`
        self._counted = 0

    def feed(self, block: bytes) -> list[RawRow]:
        """The elements that end in this block."""
        self._buffer += block
        rows: list[RawRow] = []
        for match in _TOKEN.finditer(self._buffer, self._at):
            sign, self._at = match[0], match.end()
            if sign == b'"':
                self._at = match.start()  # the string goes on in the next block
                break
            if sign in (b"[", b"{"):
                self._depth += 1
                if self._depth == 1:
                    self._cut(rows, match)
            elif sign in (b"]", b"}"):
                self._depth -= 1
                if self._depth == 0:
                    self._cut(rows, match)
            elif sign == b"," and self._depth == 1:
                self._cut(rows, match)
        else:
            self._at = len(self._buffer)
        self._line_of(self._element)
        self._buffer = self._buffer[self._element :]
        self._at -= self._element
        self._element = self._counted = 0
        return rows

    def too_large(self) -> RawRow | None:
        """The present element once it is over the limit: where it ends is not looked for, nor anything after it."""
        if len(self._buffer) <= MAX_ROW_BYTES:
            return None
        lead = len(self._buffer) - len(self._buffer.lstrip(_BLANK))
        return RawRow(self._line_of(lead), None)

    def finish(self) -> list[RawRow]:
        """What stands after the last complete element: of an array that never ends, or after its end."""
        rows: list[RawRow] = []
        self._take(rows, len(self._buffer))
        if self._depth > 0:
            rows.append(RawRow(self._line_of(len(self._buffer)), CUT_OFF))
        return rows

    def _cut(self, rows: list[RawRow], match: re.Match[bytes]) -> None:
        self._take(rows, match.start())
        self._element = match.end()

    def _take(self, rows: list[RawRow], end: int) -> None:
        piece = self._buffer[self._element : end]
        body = piece.lstrip(_BLANK)
        if body:
            line = self._line_of(self._element + len(piece) - len(body))
            rows.append(RawRow(line, body.rstrip(_BLANK)))

    def _line_of(self, place: int) -> int:
        self._line += self._buffer.count(b"\n", self._counted, place)
        self._counted = place
        return self._line


def _array(file: IO[bytes], head: bytes) -> Iterator[tuple[list[RawRow], int]]:
    splitter = _ArraySplitter()
    block = head
    while block:
        rows = splitter.feed(block)
        if (large := splitter.too_large()) is not None:
            yield [*rows, large], file.tell()
            return
        yield rows, file.tell()
        block = file.read(BLOCK_BYTES)
    yield splitter.finish(), file.tell()
