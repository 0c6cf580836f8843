"""A process that judges until it is done or killed: `python judging_child.py URL JOURNAL SAMPLES`."""

from __future__ import annotations

import sys
from pathlib import Path

from judge_world import both_of, case_of
from stub_judge import KEY

from loop_dagster.models.judge_answers import judge_answers
from loop_dagster.models.judge_openai import OpenAIJudge


def main() -> None:
    url, journal, samples = sys.argv[1:]
    judge = OpenAIJudge(url=url, model="judge-1", key=KEY, concurrency=8, backoff_s=0.01)
    cases = [case_of(at) for at in range(int(samples))]
    print("begins", flush=True)
    judge_answers(judge, cases, both_of(cases), journal=Path(journal))


if __name__ == "__main__":
    main()
