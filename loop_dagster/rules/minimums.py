"""When there is enough to train on.

Belongs here: the two minimums, how much is short, and the sentence that says so. Does not belong here: counting samples
(`selection.py`) and schedules (`schedule.py`). No setting changes a number on this page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from loop_dagster.rules.numbers import share_ceil

#: Samples that a first attempt must really train on, and new pairs that each next one must have.
TRAIN_MINIMUM: Final = 1_000
#: Held back at the least, whatever the share.
HOLDOUT_MINIMUM: Final = 100

Basis = Literal["first_version", "new_rows"]


def held_size(percent: int, usable: int, *, already: int = 0) -> int:
    """How many of `usable` samples are held back: max(100, percent % rounded up), never fewer than `already` are."""
    return max(HOLDOUT_MINIMUM, share_ceil(percent, usable), already)


def first_minimum(percent: int, *, already: int = 0) -> int:
    """The smallest n with n - held(n) ≥ 1,000: 1,100 at 5 %, 1,112 at 10 %, 1,250 at 20 %, more if more is held."""
    needed = TRAIN_MINIMUM + HOLDOUT_MINIMUM
    while needed - held_size(percent, needed, already=already) < TRAIN_MINIMUM:
        # n - held(n) grows by at most one for each n, so nothing is jumped over.
        needed = TRAIN_MINIMUM + held_size(percent, needed, already=already)
    return needed


def still_short(percent: int, *, usable: int, held: int, counting: int) -> int:
    """How many more samples must arrive until `counting` reaches 1,000, when those fill the held-back set first.

    `held` of the `usable` samples are held back now and `counting` count toward the minimum. 0 when it is met.
    """
    short = max(0, TRAIN_MINIMUM - counting)
    while short:
        taken = max(0, held_size(percent, usable + short) - held)
        if counting + short - taken >= TRAIN_MINIMUM:
            break
        short = TRAIN_MINIMUM - counting + taken
    return short


@dataclass(frozen=True, slots=True)
class Minimum:
    """How far the data is from the next attempt.

    `have` of `needed` count, `short` more have to arrive (it can be more than the difference, since new samples fill
    the held-back set first), `picked` of `have` were picked by the judge rather than reviewed by a person.
    """

    basis: Basis
    needed: int
    have: int
    short: int
    picked: int

    @property
    def ready(self) -> bool:
        return self.short == 0

    @property
    def message(self) -> str:
        picked = f" ({self.picked:,} of them picked by the judge)" if self.picked else ""
        have = f"{self.have:,} {'is' if self.have == 1 else 'are'} there{picked}"
        what = (
            f"The first attempt needs {self.needed:,} good or corrected samples, the held-back ones among them"
            if self.basis == "first_version"
            else f"The next attempt needs {self.needed:,} new samples beside the held-back ones"
        )
        return f"{what}; {have}" + ("." if self.ready else f", {self.short:,} more to come.")


def minimum(
    percent: int, *, first: bool, usable: int, held: int, kept: int, train: int, new: int, picked: int
) -> Minimum:
    """The minimum of the next attempt from the counts of its selection (rules.md, When an attempt starts).

    `held` includes the `kept` that earlier attempts hold back; `train` really train, `new` of them are pairs that the
    last trained attempt did not have. `first`: no attempt has trained yet.
    """
    counting = train if first else new
    short = still_short(percent, usable=usable, held=held, counting=counting)
    if not first:
        return Minimum(basis="new_rows", needed=TRAIN_MINIMUM, have=new, short=short, picked=picked)
    # Twins of held-back samples never count, so `have` is not `usable`; they also make the held-back share bigger than
    # what counts would, hence the maximum.
    have = held + train
    needed = max(first_minimum(percent, already=kept), have + short if short else 0)
    return Minimum(basis="first_version", needed=needed, have=have, short=short, picked=picked)
