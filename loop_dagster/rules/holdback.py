"""Which samples are held back to judge attempts, and in which order they are asked.

Belongs here: the seeded order, the choice of newly held-back samples, the questions of an attempt, the rows kept aside
for checks. Does not belong here: which samples are usable (`selection.py`), copies of their text.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from loop_dagster.rules.numbers import share_ceil

#: Questions that one attempt is judged on at most (rules.md, Held back).
MAX_QUESTIONS: Final = 1_500
#: Share of the training rows kept aside for the checks while training, and from how many rows on there is one.
CHECK_PERCENT: Final = 5
CHECK_FROM_ROWS: Final = 20

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
#: Sets the order of the checks apart from the order of the hold-back.
_CHECK_SALT: Final = 0x636865636B


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit moves every output bit."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def ranks(prompt_keys: pl.Series, *, seed: int, salt: int = 0) -> pl.Series:
    """Place of each prompt in the seeded order, signed 64-bit; lower comes first.

    Equal prompts have equal ranks, and the same seed gives the same order on every machine and in every version:
    wrapping integer arithmetic only, since the hashes of data-frame libraries change between their versions.
    """
    start = _mixed(np.array([(seed ^ salt) & (2**64 - 1)], dtype=np.uint64))
    keys = prompt_keys.cast(pl.Int64).to_numpy().view(np.uint64)
    return pl.Series("rank", _mixed(keys ^ start).view(np.int64))


def first_rows(frame: pl.DataFrame, count: int, *, by: list[str], descending: bool = False) -> pl.Series:
    """Marks the first `count` rows of `frame` in the order `by`, whose first column is numeric or a time.

    Only the rows up to the bound of the first column are sorted by the rest: sorting a million ids costs a second.
    """
    mask = np.zeros(frame.height, dtype=np.bool_)
    if 0 < count < frame.height:
        leading = frame[by[0]]
        bound = leading.top_k(count).min() if descending else leading.bottom_k(count).max()
        within = (pl.col(by[0]) >= bound) if descending else (pl.col(by[0]) <= bound)
        near = frame.select(pl.int_range(pl.len()).alias("_row"), *by).filter(within)
        mask[near.sort(by, descending=descending).head(count)["_row"].to_numpy()] = True
    elif count > 0:
        mask[:] = True
    return pl.Series("first", mask)


def newly_held(usable: pl.DataFrame, *, trained_prompts: pl.Series, places: int) -> pl.Series:
    """Marks the samples that an attempt holds back beside those already held, at most `places` of them.

    `usable` has `sample_id`, `prompt_key`, `rank`, `reviewed` and `created_at`, without the samples already held back.
    Reviewed ones come before picked ones, then the seeded order, the oldest of twins first. A prompt that any attempt
    trained on is never held back.
    """
    free = ~usable["prompt_key"].is_in(trained_prompts.implode())
    mask = np.zeros(usable.height, dtype=np.bool_)
    for candidates in (free & usable["reviewed"], free & ~usable["reviewed"]):
        rows = candidates.arg_true()
        chosen = first_rows(usable[rows], places, by=["rank", "created_at", "sample_id"])
        mask[rows.filter(chosen).to_numpy()] = True
        places -= min(places, len(rows))
    return pl.Series("held", mask)


def questions(held: pl.DataFrame) -> pl.DataFrame:
    """The held-back samples that an attempt is asked, at most 1,500, with `ordinal` from 0 beside their columns.

    `held` has `sample_id`, `held_by` (number of the attempt that held it back, the present one's for the newly held)
    and `rank`. Those held back longest come first, so that later attempts mostly answer the same questions. One that is
    gone by the time of the comparison is not replaced: the list is fixed here.
    """
    ordered = held.sort("held_by", "rank", "sample_id").head(MAX_QUESTIONS)
    return ordered.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("ordinal"))


def check_rows(train: pl.DataFrame, *, seed: int) -> pl.Series:
    """Marks the training rows kept aside for the checks while training: 5 %, at least one from 20 rows on.

    `train` has `sample_id` and `prompt_key`. Twins are neighbours in the order, so that at most one group of them lies
    on both sides. These rows count as trained on.
    """
    count = share_ceil(CHECK_PERCENT, train.height) if train.height >= CHECK_FROM_ROWS else 0
    order = ranks(train["prompt_key"], seed=seed, salt=_CHECK_SALT)
    return first_rows(train.select(order, "sample_id"), count, by=["rank", "sample_id"])
