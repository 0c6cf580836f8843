"""The report as one HTML page that needs nothing else: no server, no network, no other file.

Belongs here: putting a report into the templates, the content security policy of the page, the escaping of what its
script reads. Does not belong here: reading stores (`report_data.py`), where the charts' lines lie (`report_charts.py`).

Two guards stand between a sample's text and the page. Everything that the template prints is escaped by Jinja; the
samples themselves travel as JSON in which `<`, `>`, `&` and `'` are escaped, and `report.js` makes text nodes of them.
And should both fail, the policy lets run exactly one script and one style, named by their hashes, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from loop_dagster import report_charts, report_words
from loop_dagster.report_records import Item, Report, Side, Training
from loop_dagster.rules.decision import ComparedVerdict
from loop_dagster.rules.money import in_dollars
from loop_dagster.wire import timestamp

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES: Final = Path(__file__).parent / "templates"
#: Half of a surrogate pair is no text and has no UTF-8; in JSON it can be named.
_LONE: Final = re.compile("[\ud800-\udfff]")
_TAUGHT: Final = {
    "accepted": "marked good",
    "edited": "corrected",
    "gold": "written as right",
    "scored": "picked by the judge",
}
_RECIPE: Final = (
    ("passes", "epochs"),
    ("learning rate", "learning_rate"),
    ("LoRA rank", "lora_rank"),
    ("alpha", "lora_alpha"),
    ("rows a step", "batch_size"),
)
_AGAINST: Final[dict[ComparedVerdict, str]] = {"better": "than", "not_better": "than", "inconclusive": "against"}


def content_security_policy() -> str:
    """What the page may do: run its own script and style, known by their hashes, and nothing else."""
    return (
        f"default-src 'none'; script-src {_hash('report.js')}; style-src {_hash('report.css')}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def headline(report: Report) -> str:
    """The verdict in a few words: `Not better than v3`."""
    verdict = report.result.verdict
    return f"{report_words.VERDICTS[verdict]} {_AGAINST[verdict]} {report.incumbent_name}"


def render(report: Report) -> str:
    """The page. The same report gives the same bytes; encode it as UTF-8."""
    result = report.result
    unanswered = sum(item.unanswered for item in report.items)
    training = report.training
    page = _environment().get_template("report.html.j2")
    return page.render(
        report=report,
        result=result,
        headline=headline(report),
        missed=result.missed,
        bars=report_words.BARS,
        policy=content_security_policy(),
        style=_asset("report.css"),
        script=_asset("report.js"),
        data=_data(report),
        box=SimpleNamespace(
            width=report_charts.WIDTH,
            height=report_charts.HEIGHT,
            left=report_charts.LEFT,
            right=report_charts.RIGHT,
            top=report_charts.TOP,
            bottom=report_charts.BOTTOM,
        ),
        shares=[
            ("won", "won", result.wins),
            ("tied", "tied", result.ties),
            ("lost", "lost", result.losses),
        ],
        scores=report_charts.scores_chart(report.items),
        scores_said=_scores_said(report),
        curve=report_charts.curve_chart(training.points, training.kept_step) if training else None,
        curve_said=_curve_said(training) if training else "",
        checks=[point for point in training.points if point.check_loss is not None] if training else [],
        recipe=[(word, training.recipe[name]) for word, name in _RECIPE if name in training.recipe] if training else [],
        taught=[(_TAUGHT.get(word, word), number) for word, number in report.selected.taught_by.items()],
        outcomes=[
            (outcome, word, report.count(outcome))
            for outcome, word in report_words.OUTCOMES.items()
            if outcome in ("won", "lost", "tie", "failed") or report.count(outcome)
        ],
        unanswered=unanswered,
    )


# --- words about the charts ------------------------------------------------------------------------------------------


def _scores_said(report: Report) -> str:
    result = report.result
    if result.candidate_mean is None or result.incumbent_mean is None:
        return ""
    return (
        f"Scores of {result.rows_scored:,} samples, in the order of their change. The candidate's average is "
        f"{result.candidate_mean:.3f}, the incumbent's {result.incumbent_mean:.3f}; the dotted line at 0.70 is "
        "where an answer passes."
    )


def _curve_said(training: Training) -> str:
    checked = [point for point in training.points if point.check_loss is not None]
    kept = training.kept_check_loss
    said = f"Loss over {training.trained_steps:,} steps, with {len(checked):,} checks on rows kept aside."
    return f"{said} Step {training.kept_step:,} was kept" + (f", at a check loss of {kept:.4f}." if kept else ".")


# --- what the script reads -------------------------------------------------------------------------------------------


def _data(report: Report) -> str:
    """The samples as JSON that cannot end the element it stands in."""
    from jinja2.utils import htmlsafe_json_dumps

    tools: dict[str, int] = {}
    samples = [_sample(item, tools) for item in report.items]
    words = {
        "outcomes": report_words.OUTCOMES,
        "finishes": report_words.FINISHES,
        "references": report_words.REFERENCES,
        "sides": {
            "candidate": f"Candidate (attempt {report.attempt.attempt_no})",
            "incumbent": f"Incumbent ({report.incumbent_name})",
        },
    }
    return htmlsafe_json_dumps({"samples": samples, "words": words, "tools": list(tools)}, dumps=_compact)


def _sample(item: Item, tools: dict[str, int]) -> dict[str, Any]:
    """One sample for the script; tools are kept once each, since an app offers mostly the same."""
    offered = json.dumps(item.tools, ensure_ascii=False, indent=2) if item.tools else None
    return {
        "number": item.number,
        "sample_id": item.sample_id,
        "messages": list(item.messages),
        "tools": tools.setdefault(offered, len(tools)) if offered is not None else None,
        "right_answer": item.right_answer,
        "reference": item.reference,
        "candidate": _side(item.candidate),
        "incumbent": _side(item.incumbent),
        "outcome": item.outcome,
        "unanswered": item.unanswered,
        "candidate_first": item.candidate_first,
        "incumbent_first": item.incumbent_first,
        "agreed": item.agreed,
        "reason": item.reason,
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "answer": side.answer,
        "finish": side.finish,
        "score": side.score,
        "passed": side.passed,
        "ratings": side.ratings,
    }


def _compact(value: Any, **_: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _LONE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


# --- templates -------------------------------------------------------------------------------------------------------


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # only a page needs it

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
    )
    environment.filters |= {
        "number": lambda number: f"{number:,}",
        "percent": lambda share: "–" if share is None else f"{share:.1%}",
        "score": lambda score: "–" if score is None else f"{score:.3f}",
        "signed": lambda change: "–" if change is None else f"{change:+.4f}",
        "dollars": in_dollars,
        "needed": report_words.needed,
        "got": report_words.got,
        "rfc3339": timestamp,
        "moment": _moment,
        "duration": _duration,
        "lower_first": lambda text: text[:1].lower() + text[1:],
    }
    return environment


def _moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    parts: Sequence[tuple[int, str]] = ((whole // 3600, "h"), (whole % 3600 // 60, "min"), (whole % 60, "s"))
    return " ".join(f"{number} {unit}" for number, unit in parts if number) or "under a second"


@cache
def _asset(name: str) -> str:
    """One of our own files as it stands between its tags; the hash of the policy is of exactly this text."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


@cache
def _hash(name: str) -> str:
    digest = hashlib.sha256(_asset(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
