"""Arithmetic that more than one rule uses; each figure has exactly one function here.

Belongs here: rounding before a comparison, whole shares, the standard error of a paired change, the binomial tail.
Does not belong here: thresholds (each stands in the rule that has it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def rounded(value: float) -> float:
    """`value` to 1e-9, as every score is before it is compared: 0.7 + 0.7 + 0.7 over 3 is 0.7 (rules.md, Words)."""
    return round(value, 9)


def share_ceil(percent: int, count: int) -> int:
    """`percent` % of `count`, rounded up, in whole numbers: no float ever decides a size (rules.md, Words)."""
    return (percent * count + 99) // 100


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing, which is "cannot tell" and never 0. The order of `values` does not matter."""
    return math.fsum(values) / len(values) if values else None


def sample_sd(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1). None below two values: one value says nothing about spread."""
    middle = mean(values)
    if middle is None or len(values) < 2:
        return None
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def paired_se(changes: Sequence[float]) -> float | None:
    """Standard error of the mean of paired changes: sample SD / √n. None below two."""
    spread = sample_sd(changes)
    return None if spread is None else spread / math.sqrt(len(changes))


def binomial_tail(wins: int, decided: int) -> float | None:
    """Exact one-sided P(X ≥ wins) for X ~ Binomial(decided, ½): how often chance alone wins that often.

    None when nothing was decided. 32 of 50 and 59 of 100 are the first below 0.05 (rules.md, How it is tested).
    """
    if decided == 0:
        return None
    from scipy.stats import binomtest  # 0.4 s to import, and only a comparison needs it

    return float(binomtest(wins, decided, 0.5, alternative="greater").pvalue)
