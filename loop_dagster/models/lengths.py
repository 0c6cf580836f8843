"""How many tokens a conversation with its answer is, and when its bytes alone say that it fits.

Belongs here: counting with a model's own template, the bound that spares most rows the counting, the child for big
counts (`python -m loop_dagster.models.lengths JOB.json`). Does not belong here: what happens to a row that is too long
(rules/selection.py). Nothing here imports torch, so a sensor may count a few rows in its own process.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from loop_dagster.models.base import digest_of
from loop_dagster.models.child import LeaseRef, Reporter, run, write_atomic
from loop_dagster.models.template import RowRefusal, Template, rows_of

#: Count of a row that the template does not take (the same number as in store/selecting.py).
REFUSED = -1

#: Bytes that a message costs in canonical JSON beside its text: `{"content":"","role":"user"},`.
_MESSAGE_BYTES = 27
_AT_ONCE = 2_000
#: Most UTF-8 bytes that one byte can become under a tokenizer's normalisation; one that is not here has no bound.
_GROWTH = {"NFC": 3.0, "Lowercase": 2.0, "Prepend": 1.0, "Strip": 1.0, "StripAccents": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What a template adds: tokens to any conversation, and most tokens for one byte of `samples.bytes`.

    `per_byte` is None where the tokenizer's normalisation has no bound: then every row is counted.
    """

    fixed: int
    per_byte: float | None


def byte_bound(max_length: int, overhead: Overhead) -> int:
    """Most UTF-8 bytes (canonical JSON of messages, answer and tools) with which a row surely has `max_length` tokens
    or fewer; -1 where bytes say nothing. No token of a byte-level or byte-fallback tokenizer is less than one byte."""
    if overhead.per_byte is None or max_length < overhead.fixed:
        return -1
    return int((max_length - overhead.fixed) / overhead.per_byte)


def measure(template: Template) -> Overhead:
    """The overhead of a template, on conversations made for it.

    Tools are measured on a nested one, with half as much again on top: how a template indents them is its own affair.
    A row that this lets pass all the same, with tools nested far deeper, is left out by the training as too long.
    """
    fixed, each = template.overhead()
    grown = _normaliser_growth(json.loads(template.tokenizer.backend_tokenizer.to_str()).get("normalizer"))
    if grown is None:
        return Overhead(fixed=fixed, per_byte=None)
    return Overhead(fixed=fixed, per_byte=max(grown, each / _MESSAGE_BYTES, 1.5 * _tools_per_byte(template, fixed)))


def safe_bytes(path: Path | str, max_length: int) -> int:
    """`byte_bound` for the model in this folder; what it needs is measured once and remembered beside the folder."""
    folder = Path(path).resolve()
    digest = digest_of(folder)
    cache = folder.parent / f".{folder.name}.overhead.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads(cache.read_text(encoding="utf-8"))
        if known["digest"] == digest:
            return byte_bound(max_length, Overhead(fixed=known["fixed"], per_byte=known["per_byte"]))
    overhead = measure(template_of(folder))
    with contextlib.suppress(OSError):
        write_atomic(cache, {"digest": digest, "fixed": overhead.fixed, "per_byte": overhead.per_byte})
    return byte_bound(max_length, overhead)


def count(template: Template, records: Sequence[Mapping[str, Any]]) -> list[int]:
    """Tokens of prompt, answer and end token of each record {sample_id, messages, tools, right_answer}, in order.

    REFUSED for a conversation that the template does not take or nothing could be learned from.
    """
    return [REFUSED if isinstance(size, RowRefusal) else size for size in template.sizes(rows_of(records))]


def template_of(path: Path | str) -> Template:
    """The template of a model folder, loaded once per process and again when the folder has changed."""
    folder = Path(path).resolve()
    return _loaded(folder, digest_of(folder))


@lru_cache(maxsize=4)
def _loaded(folder: Path, digest: str) -> Template:
    return Template.load(folder)


def _normaliser_growth(normaliser: Mapping[str, Any] | None) -> float | None:
    if normaliser is None:
        return 1.0
    kind = normaliser.get("type")
    if kind == "Sequence":
        growths = [_normaliser_growth(each) for each in normaliser.get("normalizers", [])]
        total = 1.0
        for growth in growths:
            if growth is None:
                return None
            total *= growth
        return total
    if kind == "Replace":
        # SentencePiece's sign for a space is one token of its own, whatever its bytes.
        shorter = len(str(normaliser.get("content", ""))) <= 1
        return 1.0 if shorter else None
    return _GROWTH.get(str(kind))


def _tools_per_byte(template: Template, fixed: int) -> float:
    leaf: Any = {"type": "string"}
    for _ in range(4):
        leaf = {"type": "object", "properties": {"a": leaf, "b": {"type": "array", "items": {"type": "integer"}}}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "description": "d", "parameters": leaf}} for i in (1, 2)
    ]
    prompt = [{"role": "user", "content": "a"}]
    size = len(json.dumps([tools, prompt], separators=(",", ":")).encode())
    [ids] = template.prompts(rows_of([{"sample_id": "", "messages": prompt, "tools": tools}]))
    return 0.0 if isinstance(ids, RowRefusal) else max(0.0, len(ids) - fixed) / size


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsJob:
    """Count the rows of `rows_path`, JSON lines {sample_id, messages, tools, right_answer}, into `out`: a JSON array of
    what `count` says of each, in the same order."""

    work_dir: str
    base_path: str
    rows_path: str
    out: str
    seed: int = 0
    lease: LeaseRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsResult:
    """How many rows were counted, and how many of them the template refused."""

    rows: int
    refused: int


def count_all(job: LengthsJob, reporter: Reporter) -> LengthsResult:
    """The child's work."""
    template = Template.load(job.base_path)
    counts: list[int] = []
    for records in _chunks(Path(job.rows_path)):
        reporter.check()
        counts += count(template, records)
        reporter.report(len(counts), len(counts), unit="row counted")
    reporter.beat()
    write_atomic(Path(job.out), counts)
    return LengthsResult(rows=len(counts), refused=counts.count(REFUSED))


def _chunks(path: Path) -> Iterator[list[dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        while records := [json.loads(line) for _, line in zip(range(_AT_ONCE), file, strict=False)]:
            yield records


if __name__ == "__main__":
    sys.exit(run(LengthsJob, count_all))
