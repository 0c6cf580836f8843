"""How many tokens a conversation and its right answer are: bounded by bytes for nearly all, counted for the rest.

Belongs here: the bound, which loads nothing but a JSON file, and the child that counts. Does not belong here: which
samples are asked about, and keeping the counts (store/selecting.py).
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop_dagster.models.child import LeaseRef, Reporter, run
from loop_dagster.models.template import RowRefusal, Template, rows_of

#: Tokens that a chat template may add to a conversation beyond those of its text: a default system prompt, tool
#: instructions. Per message it adds less than the JSON around the message has bytes, and the bound counts those bytes.
TEMPLATE_ALLOWANCE = 512
#: Counted as this many tokens: the template refuses the conversation, or would train nothing of its answer.
REFUSED = -1
_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsJob:
    """`rows_path`: JSON lines {sample_id, messages, tools, right_answer}; `out`: JSON list of tokens in their order."""

    work_dir: str
    base_path: str
    rows_path: str
    out: str
    lease: LeaseRef | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsResult:
    """How many rows were counted, and how many of them the template refuses."""

    rows: int
    refused: int


def safe_bytes(base_path: Path, max_tokens: int) -> int:
    """UTF-8 bytes of messages, tools and answer (as canonical JSON) up to which no row passes `max_tokens`.

    Holds for tokenizers that never make more tokens than bytes (byte-level ones, and those that fall back to bytes);
    0 for any other, so that every row of it is counted.
    """
    return max(0, max_tokens - TEMPLATE_ALLOWANCE) if _bounded_by_bytes(base_path / "tokenizer.json") else 0


@functools.lru_cache(maxsize=32)
def _bounded_by_bytes(path: Path) -> bool:
    tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if (tokenizer.get("model") or {}).get("byte_fallback"):
        return True
    steps = tokenizer.get("pre_tokenizer") or {}
    return "ByteLevel" in [steps.get("type"), *(step.get("type") for step in steps.get("pretokenizers") or [])]


def count(job: LengthsJob, reporter: Reporter) -> LengthsResult:
    """Count the tokens of every row with the model's own tokenizer and template."""
    template = Template.load(job.base_path)
    records = [json.loads(line) for line in Path(job.rows_path).read_text(encoding="utf-8").splitlines() if line]
    counts: list[int] = []
    for start in range(0, len(records), _AT_ONCE):
        reporter.check()
        found = template.encode(rows_of(records[start : start + _AT_ONCE]))
        counts += [REFUSED if isinstance(one, RowRefusal) else one.tokens for one in found]
        reporter.report(len(counts), len(records), unit="row")
    Path(job.out).write_text(json.dumps(counts), encoding="utf-8")
    return LengthsResult(rows=len(counts), refused=counts.count(REFUSED))


def main(argv: list[str] | None = None) -> int:
    """Entry point of the child."""
    return run(LengthsJob, count, argv)


if __name__ == "__main__":
    sys.exit(main())
