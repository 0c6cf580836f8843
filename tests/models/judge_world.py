"""Cases, answers and a judge behind a stub server, for the tests of judging."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import polars as pl
from stub_judge import KEY, Reply, Shown, StubJudge, completion, rating

from loop_dagster.models.judge import Case
from loop_dagster.models.judge_openai import OpenAIJudge

GOOD = {"role": "assistant", "content": "The headquarters are in Lyon."}
BAD = {"role": "assistant", "content": "Somewhere else entirely, in Oslo."}


def case_of(at: int = 0, **fields: Any) -> Case:
    question = [{"role": "user", "content": f"Where are the headquarters of company {at}?"}]
    return Case(**{"sample_id": f"s{at:03}", "messages": question, "right_answer": GOOD, **fields})


def answers_of(rows: list[tuple[str, str, dict[str, Any] | None, str]]) -> pl.DataFrame:
    return pl.DataFrame(
        [(key, side, json.dumps(answer) if answer else None, finish) for key, side, answer, finish in rows],
        schema={"sample_id": pl.String, "side": pl.String, "answer": pl.String, "finish": pl.String},
        orient="row",
    )


def both_of(
    cases: list[Case], candidate: dict[str, Any] | None = GOOD, incumbent: dict[str, Any] | None = BAD
) -> pl.DataFrame:
    return answers_of(
        [
            (case.sample_id, side, answer, "stop" if answer else "empty")
            for case in cases
            for side, answer in (("candidate", candidate), ("incumbent", incumbent))
        ]
    )


@contextmanager
def judge_of(reply: Callable[[Shown], Reply], **options: Any) -> Iterator[tuple[OpenAIJudge, StubJudge]]:
    with StubJudge(reply) as stub:
        judge = OpenAIJudge(
            url=stub.url,
            model="judge-1",
            key=KEY,
            **{"timeout_s": 5.0, "backoff_s": 0.001, "concurrency": 8, **options},
        )
        yield judge, stub
        judge.close()


def verdict(shown: Shown, *, likes: Callable[[str], float] = lambda text: 10 * ("Lyon" in text)) -> Reply:
    """A judge with one opinion of each text."""
    return completion(json.dumps({f"{key}{shown.mark}": value for key, value in opinion(shown, likes=likes).items()}))


def opinion(shown: Shown, *, likes: Callable[[str], float] = lambda text: 10 * ("Lyon" in text)) -> dict[str, Any]:
    """The same, as an object whose keys have no mark."""
    if not shown.asks_preference:
        said: dict[str, Any] = json.loads(rating(likes(shown.answers[0])))
        return said
    first, second = map(likes, shown.answers)
    preference = "tie" if first == second else "first" if first > second else "second"
    return {"better": preference}
