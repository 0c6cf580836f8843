"""Whether a candidate is better than the incumbent, from the stored judgements alone.

Belongs here: the six bars in their order, the figures of a report, its warnings. Does not belong here: asking models or
a judge, and what happens with a verdict (`promotion.py`). Whoever applies a verdict computes it here once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import polars as pl

from loop_dagster.rules.feedback import Agreement
from loop_dagster.rules.numbers import binomial_tail, mean, paired_se, rounded

BarKey = Literal["rows_scored", "failures", "rubric", "mean_change", "win_rate", "beyond_chance"]
ComparedVerdict = Literal["better", "not_better", "inconclusive"]
Warning = Literal[  # noqa: A001  # the wire's own word
    "holdout_too_small",
    "judge_unreliable",
    "graders_not_applied",
    "many_failures",
    "no_judge",
    "judge_labelled_training_rows",
    "capture_source_moved",
]

PASS_SCORE: Final = 0.70
ROWS_WANTED: Final = 100
ROWS_AT_LEAST: Final = 90
BIG_CHANGE: Final = 0.05
SMALL_CHANGE: Final = 0.01
#: Of what was left to gain above the incumbent, this share is asked for when it is less than BIG_CHANGE.
LEFT_TO_GAIN: Final = 0.25
#: One-sided 5 % of a normal distribution.
Z: Final = 1.645
WIN_RATE: Final = 0.55
CHANCE: Final = 0.05

#: Everything is compared after rounding to so many decimals (rules.md, Words); bars show four of them, or more where
#: fewer would show a missed bar as met.
MOST_DECIMALS: Final = 9
DECIMALS: Final = 4

#: Missing one of these says that the comparison could not tell; missing a later one, that it is not better.
_COULD_NOT_TELL: Final = ("rows_scored", "failures", "rubric")

MANY_FAILED: Final = 0.10
AGREEMENT_ROWS: Final = 20
AGREEMENT: Final = 0.70
LENGTH_PAIRS: Final = 40
LONGER_SHARE: Final = 0.75


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: `what` says it and what was got; `needed` and `got` are on its own scale, None where it has none."""

    key: BarKey
    what: str
    needed: float | None
    got: float | None
    met: bool

    def decimals(self, least: int) -> int:
        """How many decimals show `got` and `needed` as they compare: `least`, or more where rounding would hide it.

        Figures are compared to 1e-9, so nine always do.
        """
        if self.got is None or self.needed is None:
            return least
        return decimals_below(self.got, self.needed, least)

    def as_dict(self) -> dict[str, Any]:
        return {"key": self.key, "what": self.what, "needed": self.needed, "got": self.got, "met": self.met}


@dataclass(frozen=True, slots=True)
class Decision:
    """A comparison, decided. Means and shares are None with nothing scored, `win_rate` with nothing decided."""

    verdict: ComparedVerdict
    bars: tuple[Bar, ...]
    warnings: tuple[Warning, ...]
    ended_early: str | None
    stopped: str | None
    rows_scored: int
    rows_failed: int
    rows_gone: int
    rows_not_reached: int
    wins: int
    losses: int
    ties: int
    win_rate: float | None
    candidate_mean: float | None
    incumbent_mean: float | None
    mean_change: float | None
    standard_error: float | None
    candidate_pass_rate: float | None
    incumbent_pass_rate: float | None

    @property
    def missed(self) -> Bar | None:
        """The first bar that was missed."""
        return next((bar for bar in self.bars if not bar.met), None)

    @property
    def missed_bar(self) -> BarKey | None:
        return self.missed.key if self.missed else None

    @property
    def tested(self) -> bool:
        """Whether at least one held-back sample was scored; an untested attempt can never go live."""
        return self.rows_scored > 0

    @property
    def sentence(self) -> str:
        if self.ended_early:
            return f"Inconclusive: the comparison ended before all samples were judged. {self.ended_early}"
        if self.missed is None:
            said = f"Better: every bar is met, over {self.rows_scored:,} held-back samples."
        else:
            head = "Inconclusive" if self.verdict == "inconclusive" else "Not better"
            said = f"{head}: {self.missed.what}"
        if self.stopped:
            said += f" {self.rows_not_reached:,} samples were not reached, neither failed nor gone. {self.stopped}"
        return said

    def as_row(self) -> dict[str, Any]:
        """The columns of `reports` that are decided here; `bars` and `warnings` as values, not yet as JSON text."""
        numbers = (
            *("rows_scored", "rows_failed", "rows_gone", "wins", "losses", "ties", "win_rate", "candidate_mean"),
            *("incumbent_mean", "mean_change", "candidate_pass_rate", "incumbent_pass_rate"),
        )
        return {
            "verdict": self.verdict,
            "missed_bar": self.missed_bar,
            "bars": [bar.as_dict() for bar in self.bars],
            "warnings": list(self.warnings),
            **{name: getattr(self, name) for name in numbers},
        }

    def summary(self) -> dict[str, Any]:
        """What lists of attempts show of a report: its figures, and the missed bar with its sentence."""
        row = self.as_row()
        missed = {key: value for key, value in self.missed.as_dict().items() if key != "met"} if self.missed else None
        return {
            **row,
            "missed_bar": missed,
            "standard_error": self.standard_error,
            "rows_not_reached": self.rows_not_reached,
            "stopped": self.stopped,
        }


def winner(candidate_first: str, incumbent_first: str) -> Literal["candidate", "incumbent", "tie"]:
    """Who won a sample: a win or a loss needs both orders to agree, everything else is a tie."""
    if candidate_first == incumbent_first and candidate_first in ("candidate", "incumbent"):
        return "candidate" if candidate_first == "candidate" else "incumbent"
    return "tie"


def too_few_left(left: int) -> bool:
    """Whether so few held-back samples are left at the start that nothing is compared (rules.md, How it is tested)."""
    return left < ROWS_AT_LEAST


def needed_change(incumbent_mean: float, standard_error: float) -> float:
    """The mean change that is asked for: min(0.05, max((1 - incumbent mean)/4, 1.645 x SE, 0.01))."""
    return rounded(min(BIG_CHANGE, max((1 - incumbent_mean) * LEFT_TO_GAIN, Z * standard_error, SMALL_CHANGE)))


def decide(
    judgements: pl.DataFrame,
    *,
    gone: int,
    answers: pl.DataFrame | None = None,
    agreement: Agreement | None = None,
    ended_early: str | None = None,
    stopped: str | None = None,
    not_reached: int = 0,
    also: Sequence[Warning] = (),
) -> Decision:
    """The verdict on one attempt, from its rows of `judgements` (rules.md, How it is tested).

    `gone`: held-back samples gone before the start. `answers`: the attempt's rows of `answers`, for the warning about a
    judge that prefers what is longer. `ended_early`: why the judge could not go on (key refused, model gone); the
    comparison is then inconclusive whatever the bars say. `stopped`: why the judge went no further though it could
    (money); the bars then decide on what was scored, and the sentence says so. The `not_reached` samples, for either
    reason, have no row and are neither failed nor gone. `also`: warnings that the caller knows apply. Raises ValueError
    for a scored row without scores.
    """
    rows = judgements.sort("sample_id")  # sums must not depend on the order in which a judge was done
    scored = _scored(rows)
    failed = rows.height - scored.height
    won = dict(scored.group_by("_winner").len().iter_rows())
    wins, losses = won.get("candidate", 0), won.get("incumbent", 0)
    candidate, incumbent = scored["candidate_score"].to_list(), scored["incumbent_score"].to_list()
    changes = [mine - theirs for mine, theirs in zip(candidate, incumbent, strict=True)]
    error = paired_se(changes)
    bars = (
        _rows_bar(scored.height, failed, gone),
        _failures_bar(scored.height, failed),
        _rubric_bar(scored),
        _change_bar(mean(changes), mean(incumbent), error),
        _win_bar(wins, losses),
        _chance_bar(wins, losses),
    )
    return Decision(
        verdict=_verdict(bars, ended_early=ended_early),
        bars=bars,
        warnings=_warnings(
            scored,
            failed,
            answers=answers,
            agreement=agreement,
            also=(*also, "no_judge") if ended_early and not _rated(scored) else also,
        ),
        ended_early=ended_early,
        stopped=stopped,
        rows_scored=scored.height,
        rows_failed=failed,
        rows_gone=gone,
        rows_not_reached=not_reached,
        wins=wins,
        losses=losses,
        ties=scored.height - wins - losses,
        win_rate=_rounded(wins / (wins + losses) if wins + losses else None),
        candidate_mean=_rounded(mean(candidate)),
        incumbent_mean=_rounded(mean(incumbent)),
        mean_change=_rounded(mean(changes)),
        standard_error=_rounded(error),
        candidate_pass_rate=_pass_rate(candidate),
        incumbent_pass_rate=_pass_rate(incumbent),
    )


def decimals_below(got: float, needed: float, least: int) -> int:
    """How many decimals it takes, `least` at the fewest, so that a `got` below `needed` does not read as the same."""
    if got >= needed:
        return least
    return next((one for one in range(least, MOST_DECIMALS) if round(got, one) != round(needed, one)), MOST_DECIMALS)


def swapped(judgements: pl.DataFrame) -> pl.DataFrame:
    """The same judgements with candidate and incumbent exchanged; deciding on them says whether it is clearly worse."""
    other = {"candidate": "incumbent", "incumbent": "candidate", "tie": "tie"}
    pairs = [("candidate_score", "incumbent_score"), ("candidate_ratings", "incumbent_ratings")]
    turned = [
        pl.col("incumbent_first").replace_strict(other, return_dtype=pl.String).alias("candidate_first"),
        pl.col("candidate_first").replace_strict(other, return_dtype=pl.String).alias("incumbent_first"),
        pl.col("winner").replace_strict(other, return_dtype=pl.String),
    ]
    exchanged = [pl.col(old).alias(new) for one, two in pairs for old, new in ((one, two), (two, one))]
    return judgements.with_columns(*exchanged, *turned)


def _scored(rows: pl.DataFrame) -> pl.DataFrame:
    scored = rows.filter(pl.col("status") == "scored")
    bare = scored.filter(pl.col("candidate_score").is_null() | pl.col("incumbent_score").is_null())
    if bare.height:
        raise ValueError(
            f"{bare.height} judgements are scored without scores, the first of sample {bare['sample_id'][0]}"
        )
    # The winner is derived again from both orders; only a missing answer decides without them.
    agreed = (pl.col("candidate_first") == pl.col("incumbent_first")) & (pl.col("candidate_first") != "tie")
    read = pl.when(agreed).then("candidate_first").otherwise(pl.lit("tie"))
    return scored.with_columns(pl.when("unanswered").then("winner").otherwise(read).alias("_winner"))


def _verdict(bars: Sequence[Bar], *, ended_early: str | None) -> ComparedVerdict:
    missed = [bar.key for bar in bars if not bar.met]
    if ended_early or any(key in _COULD_NOT_TELL for key in missed):
        return "inconclusive"
    return "not_better" if missed else "better"


def _rows_bar(scored: int, failed: int, gone: int) -> Bar:
    needed = max(ROWS_AT_LEAST, ROWS_WANTED - failed - gone)
    less = f" (100, less {failed + gone} failed or gone)" if needed < ROWS_WANTED else ""
    what = f"At least {needed} samples must be scored{less}; {scored:,} were."
    return Bar("rows_scored", what, float(needed), float(scored), scored >= needed)


def _failures_bar(scored: int, failed: int) -> Bar:
    what = f"At most half as many samples may fail as are scored; {failed:,} failed, {scored:,} were scored."
    return Bar("failures", what, scored / 2, float(failed), 2 * failed <= scored)


def _rubric_bar(scored: pl.DataFrame) -> Bar:
    rated = _rated(scored)
    # A model that never answers is no reason to call the comparison undecided.
    only_unanswered = scored.height > 0 and bool(scored["unanswered"].all())
    what = f"At least one sample must be rated on the rubric; {rated:,} were."
    return Bar("rubric", what, None, None, rated > 0 or only_unanswered)


def _rated(scored: pl.DataFrame) -> int:
    """Samples of which the judge rated at least one answer."""
    return scored.filter(pl.col("candidate_ratings").is_not_null() | pl.col("incumbent_ratings").is_not_null()).height


def _change_bar(change: float | None, incumbent: float | None, error: float | None) -> Bar:
    if change is None or incumbent is None or error is None:
        return Bar(
            "mean_change", "The mean change cannot be told from fewer than two scored samples.", None, None, False
        )
    needed, got = needed_change(incumbent, error), rounded(change)
    places = decimals_below(got, needed, DECIMALS)
    what = (
        f"The average score must be at least {needed:.{places}f} higher; it is {got:+.{places}f} "
        f"(incumbent {incumbent:.4f})."
    )
    return Bar("mean_change", what, needed, got, got >= needed)


def _win_bar(wins: int, losses: int) -> Bar:
    decided = wins + losses
    if not decided:
        return Bar(
            "win_rate", "At least 55 % of the decided samples must be won; none was decided.", WIN_RATE, None, False
        )
    got = rounded(wins / decided)
    places = decimals_below(got, WIN_RATE, 3) - 2  # of a percentage
    what = f"At least 55 % of the decided samples must be won; {wins:,} of {decided:,} were ({got:.{places}%})."
    return Bar("win_rate", what, WIN_RATE, got, got >= WIN_RATE)


def _chance_bar(wins: int, losses: int) -> Bar:
    got = binomial_tail(wins, wins + losses)
    if got is None:
        return Bar("beyond_chance", "Wins must be beyond chance; no sample was decided.", CHANCE, None, False)
    places = decimals_below(rounded(got), CHANCE, DECIMALS)
    share = f"{rounded(got):.{places}f}" if got >= 0.0001 else "below 0.0001"
    what = f"Chance alone must win that often less than one time in twenty; it does so with probability {share}."
    return Bar("beyond_chance", what, CHANCE, rounded(got), rounded(got) < CHANCE)


def _pass_rate(scores: Sequence[float]) -> float | None:
    return _rounded(mean([float(rounded(score) >= PASS_SCORE) for score in scores]))


def _rounded(value: float | None) -> float | None:
    return None if value is None else rounded(value)


def _warnings(
    scored: pl.DataFrame,
    failed: int,
    *,
    answers: pl.DataFrame | None,
    agreement: Agreement | None,
    also: Sequence[Warning],
) -> tuple[Warning, ...]:
    found: set[Warning] = set(also)
    if scored.height < ROWS_WANTED:
        found.add("holdout_too_small")
    if failed and rounded(failed / (scored.height + failed)) > MANY_FAILED:
        found.add("many_failures")
    disagrees = (
        agreement is not None
        and agreement.compared >= AGREEMENT_ROWS
        and rounded(agreement.agreed / agreement.compared) < AGREEMENT
    )
    if disagrees or (answers is not None and _prefers_longer(scored, answers)):
        found.add("judge_unreliable")
    return tuple(code for code in get_args(Warning) if code in found)


def _prefers_longer(scored: pl.DataFrame, answers: pl.DataFrame) -> bool:
    """Whether the longer answer won more than 75 % of at least 40 decided pairs; equal lengths say nothing."""
    length = answers.select("sample_id", "side", pl.col("answer").str.len_chars().alias("length"))
    sides = [
        length.filter(pl.col("side") == side).select("sample_id", pl.col("length").alias(side))
        for side in ("candidate", "incumbent")
    ]
    decided = scored.filter((pl.col("_winner") != "tie") & ~pl.col("unanswered"))
    pairs = decided.join(sides[0], on="sample_id").join(sides[1], on="sample_id")
    pairs = pairs.filter(pl.col("candidate") != pl.col("incumbent"))
    longer = pl.when(pl.col("candidate") > pl.col("incumbent")).then(pl.lit("candidate")).otherwise(pl.lit("incumbent"))
    chosen = pairs.filter(pl.col("_winner") == longer).height
    return pairs.height >= LENGTH_PAIRS and rounded(chosen / pairs.height) > LONGER_SHARE
