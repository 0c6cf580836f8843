"""The one table of `make bench`: every benchmark adds its lines, the runner prints them together.

A line that stands alone (a benchmark run by hand) is just not collected.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

#: Names the file that the runner collects lines in.
COLLECT = "LOOP_BENCH_LINES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure: `got` beside `aim` in `unit`; `better` says on which side of the aim it should lie."""

    what: str
    got: float
    aim: float
    unit: str
    better: Literal["higher", "lower"]
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.got >= self.aim if self.better == "higher" else self.got <= self.aim


def record(line: Line) -> None:
    """Hand a line to the runner, if one is listening."""
    path = os.environ.get(COLLECT)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")


def read(path: Path) -> list[Line]:
    """The lines collected so far."""
    if not path.is_file():
        return []
    return [Line(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def show(lines: list[Line]) -> str:
    """The lines as one table."""
    head = f"{'what':<58} {'got':>10} {'aim':>10}  {'unit':<6} {'met':<4} detail"
    rows = [
        f"{line.what:<58} {line.got:>10.3g} {'≥' if line.better == 'higher' else '≤'}{line.aim:>9.3g}  {line.unit:<6} "
        f"{'yes' if line.met else 'NO':<4} {line.detail}"
        for line in lines
    ]
    return "\n".join([head, "-" * len(head), *rows])
