"""Pictures of a training and of a comparison, for Dagster's asset pages.

Belongs here: drawing as PNG (a few kilobytes, on a light card of its own so that they read in the dark UI too) and
putting one into Markdown. Does not belong here: computing what is drawn. No text of a sample is drawn.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CARD, _INK, _FAINT, _GRID = "#fbfbfd", "#1f2733", "#667085", "#e3e6ec"
# Told apart also without colour vision (blue, orange, grey), and by shape or label beside.
_CANDIDATE, _INCUMBENT, _TIE, _KEPT = "#1565c0", "#d9730d", "#98a2b3", "#1b7f4b"


def training_curve_png(curve: Sequence[Mapping[str, Any]], kept_step: int | None) -> bytes:
    """The loss over the optimiser steps: training, checks, and the step whose weights were kept.

    `curve` is the `curve` column of `adapters`, parsed: {step, train_loss, check_loss}, either loss may be null.
    """
    figure, axes = _card(7.2, 3.4)
    trained = [(point["step"], point["train_loss"]) for point in curve if point.get("train_loss") is not None]
    checked = [(point["step"], point["check_loss"]) for point in curve if point.get("check_loss") is not None]
    if trained:
        axes.plot(*zip(*trained, strict=True), color=_INCUMBENT, linewidth=1.4, alpha=0.85, label="training rows")
    if checked:
        axes.plot(*zip(*checked, strict=True), "o-", color=_CANDIDATE, linewidth=1.8, markersize=4, label="check rows")
    if kept_step is not None:
        at = next((loss for step, loss in checked if step == kept_step), None)
        axes.axvline(kept_step, color=_KEPT, linewidth=1.2, linestyle="--", label=f"kept: step {kept_step:,}", zorder=1)
        if at is not None:
            axes.plot(
                [kept_step], [at], "o", markersize=10, markerfacecolor="none", markeredgecolor=_KEPT, markeredgewidth=2
            )
            axes.annotate(
                f"{at:.3f}",
                (kept_step, at),
                xytext=(0, 11),
                textcoords="offset points",
                ha="center",
                color=_KEPT,
                fontsize=9,
            )
    losses = [loss for _, loss in (*trained, *checked)]
    if losses:
        axes.set_ylim(0, max(losses) * 1.1 or 1)
    else:
        axes.text(0.5, 0.5, "no loss was logged", transform=axes.transAxes, ha="center", color=_FAINT)
    axes.set_title("Loss while training", color=_INK, fontsize=12, loc="left", fontweight="bold")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss (nats per answer token)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", frameon=False, fontsize=9)
    return _png(figure)


def scores_png(judgements: pl.DataFrame) -> bytes:
    """Both models' scores sample by sample with their means, and how many samples were won, tied and lost.

    `judgements` has at least status, candidate_score, incumbent_score and winner of the table of that name. Samples
    stand in the order of the change, the candidate's worst at the left.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.ticker import MaxNLocator

    scored = (
        judgements.filter(pl.col("status") == "scored")
        .with_columns(change=pl.col("candidate_score") - pl.col("incumbent_score"))
        .sort("change", "incumbent_score", "candidate_score")
    )
    failed = judgements.height - scored.height
    figure, axes = _card(7.2, 4.3)
    top = axes.inset_axes((0, 1.06, 1, 0.07))
    _outcome_bar(top, scored)
    if scored.height:
        places = range(1, scored.height + 1)
        mine, theirs = scored["candidate_score"].to_list(), scored["incumbent_score"].to_list()
        colours = [_CANDIDATE if new > old else _INCUMBENT for new, old in zip(mine, theirs, strict=True)]
        stems = [((x, old), (x, new)) for x, new, old in zip(places, mine, theirs, strict=True)]
        size = max(2.0, min(5.0, 400 / scored.height))
        axes.add_collection(LineCollection(stems, colors=colours, linewidths=min(1.5, size / 3), alpha=0.3))
        axes.plot(places, theirs, "s", color=_INCUMBENT, markersize=size, markeredgewidth=0, label="incumbent")
        axes.plot(places, mine, "o", color=_CANDIDATE, markersize=size, markeredgewidth=0, label="candidate")
        _mean_lines(axes, sum(mine) / len(mine), sum(theirs) / len(theirs))
        axes.set_xlim(0, scored.height + 1)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "no sample was scored", transform=axes.transAxes, ha="center", color=_FAINT)
        axes.set_xticks([])
    axes.set_ylim(-0.04, 1.04)
    axes.set_xlabel("sample, by change of its score" + (f" ({failed:,} more could not be scored)" if failed else ""))
    axes.set_ylabel("score (0 to 1; passes at 0.70)")
    return _png(figure)


def as_markdown(png: bytes, alt: str) -> str:
    """A Markdown image that carries its bytes in itself, for `MetadataValue.md`."""
    alt = alt.replace("[", "(").replace("]", ")").replace("\n", " ")
    return f"![{alt}](data:image/png;base64,{base64.b64encode(png).decode('ascii')})"


def _card(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure of this size in inches, styled, with one pair of axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=_CARD, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=_CARD)
    axes.grid(True, axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=_FAINT, labelsize=9)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    return figure, axes


def _outcome_bar(axes: Axes, scored: pl.DataFrame) -> None:
    """Won, tied and lost as one bar under the title, the counts beside it in words."""
    counts = [
        (int((scored["winner"] == winner).sum()), word, colour)
        for winner, word, colour in (
            ("incumbent", "lost", _INCUMBENT),
            ("tie", "tied", _TIE),
            ("candidate", "won", _CANDIDATE),
        )
    ]
    left = 0
    for count, _, colour in counts:
        axes.barh(0, count, left=left, color=colour, height=1)
        left += count
    axes.set_xlim(0, max(left, 1))
    axes.set_axis_off()
    axes.set_title("Held-back samples", color=_INK, fontsize=12, loc="left", fontweight="bold")
    said = ", ".join(f"{count:,} {word}" for count, word, _ in reversed(counts))
    axes.set_title(f"candidate: {said}", color=_INK, fontsize=10, loc="right")


def _mean_lines(axes: Axes, candidate: float, incumbent: float) -> None:
    """Dashed lines at both means, named beyond the right edge and apart from each other."""
    apart = 0.15  # of the score: the height of a label
    middle, half = (candidate + incumbent) / 2, max(abs(candidate - incumbent), apart) / 2
    above = candidate >= incumbent
    for mean, colour, word, up in (
        (candidate, _CANDIDATE, "candidate", above),
        (incumbent, _INCUMBENT, "incumbent", not above),
    ):
        axes.axhline(mean, color=colour, linewidth=1.3, linestyle="--")
        axes.annotate(
            f"{word}\nmean {mean:.3f}",
            (1.012, middle + half if up else middle - half),
            xycoords=("axes fraction", "data"),
            va="center",
            color=colour,
            fontsize=9,
            fontweight="bold",
            annotation_clip=False,
        )


def _png(figure: Figure) -> bytes:
    """PNG at 110 dots per inch in 64 colours; no time or version in it, so the same data gives the same bytes."""
    from PIL import Image

    raw = io.BytesIO()
    figure.savefig(raw, format="png", dpi=110, facecolor=_CARD, metadata={"Software": None})
    out = io.BytesIO()
    Image.open(raw).convert("RGB").quantize(64).save(out, format="png", optimize=True)
    return out.getvalue()
