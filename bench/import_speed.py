"""Import of chat lines against raw Polars, in the same run.

Ours: decode, parse, redact, identify, key and store, through `import_file`. The peer, at its best documented settings:
`polars.read_ndjson` of the same file and `write_delta`, which reads no conversation, hides no secret and knows no row
again. Each side runs in a process of its own so that peak memory is its own, in alternating order; the median of three
counts. Then every stored row without a planted secret is compared with its line: rows changed by mistake must be 0.

    python -m bench.import_speed [--rows 200000] [--repeats 3] [--seed 1] [--tools 0 0.1]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.table import Line, record

SPAWN = multiprocessing.get_context("spawn")
WORDS = (  # noqa: SIM905
    "order parcel refund invoice the a is was were where when please could would have been waiting since yesterday "
    "warehouse address delivery customer account change cancel confirm number shipping payment returned support café "
    "naïve Größe straße — “quoted” don’t 北京 привет 😀 déjà"
).split()
FIGURES = ("12.50", "3,5", "1e2", "10:20:30", "2026-11-29", "50 %", "#48812", "7")
#: Near enough to a secret that only the exact redactor can tell.
LOOKALIKES = ("4111 1111 1111 1112", "v1.2.3.4", "+49 170 1234567", "@pat", "fe::", "1732886400000")
SECRETS = (
    "pat.{}@example.org",
    "4111 1111 1111 1111",
    "sk-proj-abcdefghijklmnopqrstuvwxyz01234567{}",
    "AKIAIOSFODNN7EXAMPLE",
    "203.0.113.9",
    "078-05-1120",
)
SECRET_SHARE, LOOKALIKE_SHARE = 0.02, 0.05
AIM = 0.35


def sentence(dice: random.Random, size: int) -> str:
    words = dice.choices(WORDS, k=size)
    words[dice.randrange(size)] = dice.choice(FIGURES if dice.random() > LOOKALIKE_SHARE else LOOKALIKES)
    return " ".join(words)


def row(dice: random.Random, number: int, tools: float) -> tuple[dict[str, Any], bool]:
    """One chat of about 1 kB and whether a secret was planted in it."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You answer for our support desk."},
        {"role": "user", "content": f"{sentence(dice, 55)} {number}?"},
    ]
    if dice.random() < tools:
        arguments = {"order_id": str(number), "amount": dice.randrange(1, 10_000) / 4, "urgent": True}
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "find_order", "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append(
            {"role": "tool", "tool_call_id": f"call_{number}", "content": '{"status": "shipped", "eta": 1.5}'}
        )
    answer = sentence(dice, 60)
    secret = dice.random() < SECRET_SHARE
    if secret:
        answer += " " + dice.choice(SECRETS).format(number)
    messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}, secret


def write_lines(path: Path, rows: int, seed: int, tools: float) -> set[int]:
    """Write the file; returns the positions of the rows with a planted secret."""
    dice, planted = random.Random(seed), set()
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            value, secret = row(dice, number, tools)
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
            if secret:
                planted.add(number)
    return planted


def ours(path: str, target: str) -> None:
    from loop_dagster.store.importing import import_file
    from loop_dagster.store.lake import Lake

    result = import_file(Path(path), Lake(target), source="bench", labels=["bench"], now=datetime.now(UTC))
    if not result.complete or result.refused:
        raise SystemExit(f"the import was not complete: {result.as_dict()}")


def peer(path: str, target: str) -> None:
    import polars as pl

    pl.read_ndjson(path).write_delta(target)


def _child(work: Callable[[str, str], None], path: str, target: str, told: Any) -> None:
    # Imported before the clock starts, on both sides alike.
    import polars as pl

    import loop_dagster.store.importing  # noqa: F401

    pl.DataFrame({"a": [1]}).write_delta(f"{target}.warm", mode="overwrite")
    before, started = time.process_time(), time.perf_counter()
    work(path, target)
    seconds, processor = time.perf_counter() - started, time.process_time() - before
    told.send((seconds, processor, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def measured(work: Callable[[str, str], None], path: Path, target: Path) -> tuple[float, float, float]:
    """Seconds, processor seconds and peak MiB of one run in a process of its own."""
    shutil.rmtree(target, ignore_errors=True)
    told, telling = SPAWN.Pipe(duplex=False)
    child = SPAWN.Process(target=_child, args=(work, str(path), str(target), telling))
    child.start()
    telling.close()
    try:
        numbers: tuple[float, float, float] = told.recv()
    except EOFError:
        raise SystemExit(f"{work.__name__} did not finish") from None
    child.join()
    return numbers


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def changed_by_mistake(path: Path, lake: Path, planted: set[int]) -> tuple[int, int]:
    """Rows without a secret that are not stored as they were, and rows with one that kept it."""
    from loop_dagster.store.lake import Lake
    from loop_dagster.tables import SAMPLES

    stored = Lake(str(lake)).scan(SAMPLES).select("position", "messages", "answer").collect().sort("position")
    if stored["position"].to_list() != list(range(stored.height)):
        raise SystemExit("rows are missing or there twice")
    wrong = kept = 0
    for number, (value, messages, answer) in enumerate(
        zip(lines_of(path), stored["messages"], stored["answer"], strict=True)
    ):
        given = value["messages"]
        for message in given:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(
                    call["function"]["arguments"], sort_keys=True, separators=(",", ":")
                )
        same = [*json.loads(messages), json.loads(answer)] == given
        marked = "[redacted:" in answer
        wrong += number not in planted and not same
        kept += number in planted and not marked
    return wrong, kept


def compare(rows: int, repeats: int, seed: int, tools: float) -> bool:
    """Measure one mix, print and record it; returns whether every row came through as it should."""
    with tempfile.TemporaryDirectory() as folder:
        path, lake = Path(folder) / "rows.jsonl", Path(folder) / "lake"
        planted = write_lines(path, rows, seed, tools)
        size = path.stat().st_size
        times: dict[str, list[tuple[float, float, float]]] = {"ours": [], "polars": []}
        for turn in range(repeats):
            sides = [("ours", ours, lake), ("polars", peer, Path(folder) / "peer")]
            for name, work, target in sides if turn % 2 == 0 else reversed(sides):
                times[name].append(measured(work, path, target))
        wrong, kept = changed_by_mistake(path, lake, planted)
    print(f"\n{rows:,} chats, {size / rows:,.0f} bytes each, {tools:.0%} with tools, {len(planted):,} with a secret\n")
    print(f"{'':8}{'seconds':>10}{'rows/s':>12}{'cpu s':>10}{'peak MiB':>12}")
    middle = {
        name: tuple(statistics.median(column) for column in zip(*runs, strict=True)) for name, runs in times.items()
    }
    for name, (seconds, processor, memory) in middle.items():
        print(f"{name:8}{seconds:>10.2f}{rows / seconds:>12,.0f}{processor:>10.2f}{memory:>12,.0f}")
    ratio = middle["polars"][0] / middle["ours"][0]
    print(f"\nratio {ratio:.2f} (aim {AIM}), rows changed by mistake {wrong}, secrets kept {kept}")
    record(
        Line(
            what=f"import speed beside raw Polars, {tools:.0%} of chats with tools",
            got=ratio,
            aim=AIM,
            unit="×",
            better="higher",
            detail=f"{rows:,} chats, {rows / middle['ours'][0]:,.0f} rows/s, "
            f"{middle['ours'][1] / rows * 1e6:.0f} µs of processor a row, "
            f"peak {middle['ours'][2]:,.0f} MiB (Polars {middle['polars'][2]:,.0f}), "
            f"changed by mistake {wrong}, secrets kept {kept}",
        )
    )
    return not wrong and not kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tools", type=float, nargs="+", default=[0.0, 0.1], help="shares of chats with tool calls, one run each"
    )
    options = parser.parse_args()
    right = [compare(options.rows, options.repeats, options.seed, share) for share in options.tools]
    if not all(right):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
