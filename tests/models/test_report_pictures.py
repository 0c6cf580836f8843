"""Pictures: PNGs of a bounded size, the same bytes for the same data, drawn from whatever there is."""

from __future__ import annotations

import base64
import random
import struct
from typing import Any

import polars as pl
import pytest

from loop_dagster.models.report_pictures import as_markdown, scores_png, training_curve_png

SCHEMA = {"status": pl.String, "candidate_score": pl.Float64, "incumbent_score": pl.Float64, "winner": pl.String}


def _judgements(count: int) -> pl.DataFrame:
    rng = random.Random(count)
    rows: list[tuple[Any, ...]] = []
    for _ in range(count):
        new, old = rng.random(), rng.choice([0.0, 0.45, rng.random()])
        failed = rng.random() < 0.05
        winner = rng.choice(["candidate", "incumbent", "tie"])
        rows.append(("failed", None, None, None) if failed else ("scored", new, old, winner))
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.parametrize("count", [0, 1, 2, 100, 1_500])
def test_scores(count: int) -> None:
    png = scores_png(_judgements(count))
    width, height = _size(png)
    assert 500 < width < 1200 and 300 < height < 800 and len(png) < 60_000
    assert scores_png(_judgements(count)) == png


def test_only_failed_samples() -> None:
    frame = pl.DataFrame([("failed", None, None, None)], schema=SCHEMA, orient="row")
    assert scores_png(frame) != scores_png(_judgements(0))  # it says how many could not be scored


@pytest.mark.parametrize("points", [0, 1, 200])
@pytest.mark.parametrize("kept", [None, 50, 999])
def test_the_curve(points: int, kept: int | None) -> None:
    curve = [
        {
            "step": step,
            "train_loss": 2.0 / step if step % 3 else None,
            "check_loss": 1 / step if step % 10 == 0 else None,
        }
        for step in range(1, points + 1)
    ]
    png = training_curve_png(curve, kept)
    width, height = _size(png)
    assert 500 < width < 1200 and 200 < height < 800 and len(png) < 60_000


def test_the_kept_step_is_drawn() -> None:
    curve = [{"step": step, "train_loss": 1.0, "check_loss": 0.9} for step in (10, 20)]
    assert len({training_curve_png(curve, kept) for kept in (None, 10, 20)}) == 3


def test_markdown_carries_the_bytes() -> None:
    png = scores_png(_judgements(3))
    text = as_markdown(png, "scores [v2]\nof all")
    head, _, data = text.partition("base64,")
    assert head == "![scores (v2) of all](data:image/png;"
    assert base64.b64decode(data.removesuffix(")")) == png
