"""How near judging comes to what its concurrency allows: 100 samples, four calls each, a judge that takes 200 ms.

Run: `python -m bench.judge_speed [--samples 100] [--delay-ms 200] [--repeat 3]`. The judge is a stub server in another
process, over real HTTP. Measured is `judge_answers` with the judge `openai` at its concurrency of 32, from nothing (no
connection is open yet) to the last judgement, with a journal as in an attempt. The ideal is calls x delay / 32: what a
client takes that costs nothing and leaves no connection idle. A figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import polars as pl

from bench.stub_server import serve, started, whole
from bench.table import Line, record
from loop_dagster.models.judge import DIMENSIONS, Case
from loop_dagster.models.judge_answers import judge_answers
from loop_dagster.models.judge_openai import CONCURRENCY, OpenAIJudge

CALLS_A_SAMPLE = 4
RATINGS = json.dumps(dict.fromkeys(DIMENSIONS, 8))
PREFERENCE = json.dumps({"better": "tie"})


def reply(body: bytes) -> bytes:
    """What the stub says to one request: ratings or a preference, whichever it is asked for."""
    text = PREFERENCE if b"SECOND ANSWER" in body else RATINGS
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": len(body) // 4, "completion_tokens": 20}
    return whole(json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode())


def questions(count: int) -> tuple[list[Case], pl.DataFrame]:
    """Cases as support conversations are: about 1 kB with both answers."""
    history = [
        {"role": "system", "content": "You answer for a shop. " + "Be brief, be right, name the page. " * 6},
        {"role": "user", "content": "I ordered two weeks ago and nothing came. " * 4},
    ]
    cases = [
        Case(
            sample_id=f"s{at:05}",
            messages=[*history, {"role": "user", "content": f"Where is order {at}?"}],
            right_answer={"role": "assistant", "content": f"Order {at} left on Monday; page 4 follows it."},
        )
        for at in range(count)
    ]
    rows = [
        (
            case.sample_id,
            side,
            json.dumps({"role": "assistant", "content": f"{side} says: " + "it is under way. " * 10}),
        )
        for case in cases
        for side in ("candidate", "incumbent")
    ]
    answers = pl.DataFrame(rows, schema=["sample_id", "side", "answer"], orient="row")
    return cases, answers.with_columns(finish=pl.lit("stop"))


def seconds(url: str, samples: int) -> float:
    """Wall time of judging so many samples, from no connection to the last row."""
    cases, answers = questions(samples)
    judge = OpenAIJudge(url=url, model="stub")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        judged = judge_answers(judge, cases, answers, journal=Path(folder) / "judged.jsonl")
        took = time.perf_counter() - began
    judge.close()
    assert judged.frame.height == samples and set(judged.frame["status"]) == {"scored"}, judged
    assert judged.total.calls == samples * CALLS_A_SAMPLE and not judged.total.estimated
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--delay-ms", type=float, default=200)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    delay_s = options.delay_ms / 1000
    if options.serve:
        asyncio.run(serve(reply, delay_s))
        return
    with started("bench.judge_speed", options.delay_ms) as url:
        seconds(url, 8)  # imports
        rounds = [seconds(url, options.samples) for _ in range(options.repeat)]
    calls = options.samples * CALLS_A_SAMPLE
    ideal, got = calls * delay_s / CONCURRENCY, statistics.median(rounds)
    print(
        f"{calls} calls of {options.delay_ms:g} ms at {CONCURRENCY} at once: {', '.join(f'{s:.2f} s' for s in rounds)}"
    )
    print(f"median {got:.2f} s against an ideal of {ideal:.2f} s: {got / ideal:.3f} x ({calls / got:.0f} calls/s)")
    record(
        Line(
            what=f"{calls} calls to a judge of {options.delay_ms:g} ms, against the ideal",
            got=got / ideal,
            aim=1.15,
            unit="x",
            better="lower",
            detail=f"{got:.2f} s against {ideal:.2f} s at {CONCURRENCY} at once",
        )
    )


if __name__ == "__main__":
    main()
