"""What codes of a report mean, in words: bars, warnings, judges, answers that ended early, samples that failed.

Belongs here: sentences that the page, the command line and the API share, and nothing that is computed. Does not
belong here: sentences with figures in them (`rules/decision.py` writes those), and the texts of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from loop_dagster.rules.decision import DECIMALS, Bar, BarKey, ComparedVerdict
from loop_dagster.rules.decision import Warning as WarningCode

Outcome = Literal["won", "lost", "tie", "failed", "gone", "not_reached", "not_asked"]
ReferenceKind = Literal["good", "correction", "gold"]
JudgeKind = Literal["reference", "openai", "own"]

VERDICTS: Final[Mapping[ComparedVerdict, str]] = {
    "better": "Better",
    "not_better": "Not better",
    "inconclusive": "Inconclusive",
}

BARS: Final[Mapping[BarKey, str]] = {
    "rows_scored": "Enough samples scored",
    "failures": "Few samples failed",
    "rubric": "Rated on the rubric",
    "mean_change": "Higher average score",
    "win_rate": "Win rate",
    "beyond_chance": "Beyond chance",
}

OUTCOMES: Final[Mapping[Outcome, str]] = {
    "won": "Won",
    "lost": "Lost",
    "tie": "Tie",
    "failed": "Failed",
    "gone": "Gone before the start",
    "not_reached": "Not reached",
    "not_asked": "Not asked",
}

REFERENCES: Final[Mapping[ReferenceKind, str]] = {
    "good": "A person marked this answer good.",
    "correction": "A person corrected the answer to this.",
    "gold": "A person wrote this as the right answer.",
}

#: How an answer ended, where that needs a word; an answer that ended by itself needs none.
FINISHES: Final[Mapping[str, str]] = {
    "length": "Cut off at the limit of tokens; judged as it stands.",
    "too_long": "Not asked: the conversation is longer than the model reads.",
    "empty": "It answered with nothing.",
    "error": "It gave no answer: the conversation could not be put to it.",
}

_WARNINGS: Final[Mapping[WarningCode, str]] = {
    "holdout_too_small": "Fewer than 100 samples were scored, so a small difference would not have been seen.",
    "judge_unreliable": "The judge is not reliable here: it disagrees with people too often, or mostly prefers the "
    "longer answer. Read some of its decisions below before you trust the verdict.",
    "graders_not_applied": "A grader that the pipeline asks for was not applied.",
    "many_failures": "More than a tenth of the samples could not be scored; those that could may not stand for all.",
    "no_judge": "No judge rated the answers.",
    "judge_labelled_training_rows": "Some of the training samples were picked by the judge and reviewed by nobody, so "
    "the judge may favour what it picked itself.",
    "capture_source_moved": "The source that the samples came from changed while they were recorded.",
}

_FAILURES: Final[Mapping[str, str]] = {
    "INCUMBENT_UNANSWERED": "The incumbent gave no answer, so there was nothing to compare with.",
    "JUDGE_UNREADABLE": "The judge's reply could not be read, twice.",
    "JUDGE_UNAVAILABLE": "The judge could not be reached.",
    "JUDGE_REJECTED": "The judge's server took no such request; mostly the conversation is too long for it.",
}


def warning_sentence(code: str) -> str:
    """The sentence of a warning; an unknown code stands for itself."""
    return next((sentence for known, sentence in _WARNINGS.items() if known == code), code)


def failure_sentence(code: str | None) -> str:
    """Why a sample could not be scored; an unknown code is named."""
    return _FAILURES.get(code or "", f"It could not be scored ({code or 'no reason was kept'}).")


def judge_kind(setting: str) -> JudgeKind:
    """Which sort of judge `LOOP_JUDGE` named."""
    if setting in ("reference", "openai"):
        return "reference" if setting == "reference" else "openai"
    return "own"


def judge_sentence(kind: JudgeKind, name: str) -> str:
    """Who judged, so that nobody takes the embedded judge for a language model (rules.md, How it is tested)."""
    if kind == "reference":
        return (
            "Judged by the embedded reference judge, which is not a language model. It compares each answer with the "
            "right answer by its facts and words: a right answer in quite other words is rated low, and without a "
            "right answer nothing passes."
        )
    if kind == "openai":
        return f"Judged by the model {name}, which saw the answers blind and in both orders."
    return f"Judged by {name}, a judge of this installation's own, which saw the answers blind and in both orders."


def needed(bar: Bar) -> str:
    """What a bar asks for, on its own scale."""
    if bar.key == "rubric":
        return "at least 1 rating"
    if bar.needed is None:
        return "–"
    if bar.key == "rows_scored":
        return f"at least {bar.needed:,.0f}"
    if bar.key == "failures":
        return f"at most {bar.needed:,g}"
    if bar.key == "mean_change":
        return f"at least {bar.needed:+.{bar.decimals(DECIMALS)}f}"
    return f"at least {bar.needed:.0%}" if bar.key == "win_rate" else f"below {bar.needed:g}"


def got(bar: Bar) -> str:
    """What was got, on the same scale."""
    if bar.key == "rubric":
        return "rated" if bar.met else "none"
    if bar.got is None:
        return "–"
    if bar.key in ("rows_scored", "failures"):
        return f"{bar.got:,.0f}"
    if bar.key == "mean_change":
        return f"{bar.got:+.{bar.decimals(DECIMALS)}f}"
    if bar.key == "win_rate":
        return f"{bar.got:.{bar.decimals(3) - 2}%}"  # a percentage has two decimals fewer
    return f"{bar.got:.{bar.decimals(DECIMALS)}f}" if bar.got >= SMALLEST_SHOWN else f"below {SMALLEST_SHOWN}"


#: A probability below this says nothing more by more digits.
SMALLEST_SHOWN: Final = 0.0001
