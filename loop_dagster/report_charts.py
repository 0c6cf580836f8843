"""Geometry of the report's two charts: where each line, dot and label of the training curve and the scores lies.

Belongs here: turning stored points into coordinates of an SVG of a fixed size, without any markup or colour. Does not
belong here: computing what is drawn (`report_data.py`) and the markup (`templates/charts.html.j2`). Everything is drawn
for a width of 440 units, so that it reads on a phone, and is as large as its place allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from loop_dagster.report_records import Item, Point
from loop_dagster.rules.decision import PASS_SCORE
from loop_dagster.rules.numbers import mean

WIDTH: Final = 440
HEIGHT: Final = 270
#: Where the axes lie; what is outside is for their labels.
LEFT, RIGHT, TOP, BOTTOM = 60, 416, 16, 222


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: where, and what it says."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class CurveChart:
    """Loss over optimiser steps. `train` and `check` are lists of points of a polyline (`x,y x,y`), empty for none.

    `checks` are the dots of the check line as a path. `kept` is where the kept step lies, None when no step was kept
    within the chart; `kept_y` the check loss there.
    """

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    train: str
    check: str
    checks: str
    kept: float | None
    kept_y: float | None


@dataclass(frozen=True, slots=True)
class ScoresChart:
    """Both scores of every scored sample, by change, the candidate's worst at the left.

    `better`, `worse`: stems of samples on which the candidate scored higher, or lower, as paths; `candidate` and
    `incumbent`: dots as paths of no length, drawn by a line end of `dot` units; stems are `stem` units
    wide. `pass_y`: where a score passes.
    """

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    better: str
    worse: str
    candidate: str
    incumbent: str
    dot: float
    stem: float
    candidate_y: float
    incumbent_y: float
    pass_y: float


def curve_chart(points: Sequence[Point], kept_step: int | None) -> CurveChart | None:
    """The chart of a training; None when no loss was logged."""
    train = [(point.step, point.train_loss) for point in points if point.train_loss is not None]
    check = [(point.step, point.check_loss) for point in points if point.check_loss is not None]
    if not train and not check:
        return None
    last = max(1, *(step for step, _ in (*train, *check)))
    top = max(loss for _, loss in (*train, *check)) * 1.05 or 1.0
    steps, losses = _round_steps(last, 5, whole=True), _round_steps(top, 4)

    def place(step: float, loss: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * step / last, BOTTOM - (BOTTOM - TOP) * loss / top

    at = next((loss for step, loss in check if step == kept_step), None)
    inside = kept_step is not None and 0 <= kept_step <= last
    return CurveChart(
        x_ticks=tuple(Tick(_short(place(step, 0)[0]), f"{step:,.0f}") for step in steps),
        y_ticks=tuple(Tick(_short(place(0, loss)[1]), f"{loss:g}") for loss in losses),
        train=_polyline(place(step, loss) for step, loss in train),
        check=_polyline(place(step, loss) for step, loss in check),
        checks=_dots(place(step, loss) for step, loss in check),
        kept=_short(place(kept_step, 0)[0]) if inside and kept_step is not None else None,
        kept_y=_short(place(0, at)[1]) if at is not None else None,
    )


def scores_chart(items: Iterable[Item]) -> ScoresChart | None:
    """The chart of the scores; None when no sample was scored."""
    pairs = [
        (item.candidate.score, item.incumbent.score)
        for item in items
        if item.outcome in ("won", "lost", "tie")
        and item.candidate.score is not None
        and item.incumbent.score is not None
    ]
    if not pairs:
        return None
    pairs.sort(key=lambda pair: (pair[0] - pair[1], pair[1], pair[0]))
    width = (RIGHT - LEFT) / len(pairs)
    across = [LEFT + (at + 0.5) * width for at in range(len(pairs))]
    mine, theirs = mean([new for new, _ in pairs]), mean([old for _, old in pairs])
    assert mine is not None
    assert theirs is not None
    stems = [(x, _score_y(old), _score_y(new)) for x, (new, old) in zip(across, pairs, strict=True)]
    counts = [count for count in _round_steps(len(pairs), 5, whole=True) if count >= 1]
    return ScoresChart(
        x_ticks=tuple(Tick(_short(LEFT + (count - 0.5) * width), f"{count:,.0f}") for count in counts),
        y_ticks=tuple(Tick(_short(_score_y(score)), f"{score:g}") for score in (0, 0.25, 0.5, 0.75, 1)),
        better=_stems((x, old, new) for x, old, new in stems if new < old),
        worse=_stems((x, old, new) for x, old, new in stems if new > old),
        candidate=_dots((x, new) for x, _, new in stems),
        incumbent=_dots((x, old) for x, old, _ in stems),
        stem=round(min(1.0, width * 0.8), 2),
        dot=_short(max(1.6, min(5.0, 360 / len(pairs)))),
        candidate_y=_short(_score_y(mine)),
        incumbent_y=_short(_score_y(theirs)),
        pass_y=_short(_score_y(PASS_SCORE)),
    )


def _score_y(score: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * score


def _round_steps(top: float, most: int, *, whole: bool = False) -> list[float]:
    """0 and multiples of 1, 2 or 5 times a power of ten up to `top`, about `most` of them."""
    rough = top / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    return [step * at for at in range(int(top / step + 1e-9) + 1)]


def _polyline(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{_short(x):g},{_short(y):g}" for x, y in points)


def _dots(points: Iterable[tuple[float, float]]) -> str:
    return "".join(f"M{_short(x):g} {_short(y):g}h0" for x, y in points)


def _stems(stems: Iterable[tuple[float, float, float]]) -> str:
    return "".join(f"M{_short(x):g} {_short(old):g}V{_short(new):g}" for x, old, new in stems)


def _short(value: float) -> float:
    """A tenth of a unit is finer than any screen; more digits would only make the page longer."""
    return round(value, 1)
