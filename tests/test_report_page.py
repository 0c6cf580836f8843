"""The report page as a file, parsed without a browser: complete, self-contained, harmless whatever a sample says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from report_world import Question, compared, questions

from loop_dagster.report_charts import BOTTOM, LEFT, RIGHT, TOP, curve_chart
from loop_dagster.report_data import report_of
from loop_dagster.report_page import content_security_policy, render
from loop_dagster.report_records import Point
from loop_dagster.settings import Settings
from loop_dagster.store.open import Store, open_store

#: Texts that would do something if any of them were ever read as markup, as script, or as an order of characters.
HOSTILE = [
    "</script><script>document.title = 'owned'</script>",
    "<!--<script>",
    "--><img src=http://leak.test/a onerror=\"document.title = 'owned'\">",
    "&lt;b&gt; &amp; &#x3c; \"quoted\" 'quoted' `quoted` {{ 7 * 7 }} {% raw %}",
    "\u202eevil\u202c \u2066isolated\u2069 \u200f",
    "line\u2028separator\u2029and\x00nul\x1b[31m",
    "]]></textarea></style></title><base href=http://leak.test/>",
    "A" * 100_000,
    "שלום <b>عالم</b> 日本語 🏴󠁧󠁢󠁥󠁮󠁧󠁿 e\u0301",
    "half \ud83d pair",
]


@dataclass
class Read(HTMLParser):
    """Every element with its attributes, and the text of each script and style."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    inside: list[tuple[str, dict[str, str | None], str]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: tuple[str, dict[str, str | None]] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._open = (tag, dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self.inside.append((*self._open, data))
        else:
            self.text += data


def read(page: str) -> Read:
    parser = Read()
    parser.feed(page)
    parser.close()
    return parser


@pytest.fixture
def store(home: Path) -> Store:
    return open_store(Settings(home=home))


@pytest.fixture
def hostile(store: Store) -> str:
    """A page in which every field that holds text of somebody else is hostile."""
    calls = [{"type": "function", "function": {"name": "<i>find</i>", "arguments": '{"q": "</script>"}'}}]
    asked = [
        Question(
            prompt=text,
            right=text,
            candidate=text,
            incumbent=text,
            tools=[{"type": "function", "function": {"name": text[:50], "description": text}}],
            calls=calls,
        )
        for text in HOSTILE
    ]
    asked.append(Question(messages=[{"role": "<b>", "content": HOSTILE[0], "name": HOSTILE[1]}]))
    bad = "<script>document.title = 'owned'</script>"
    attempt = compared(
        store, asked, name=f"Sup&port {bad}", judge=f"judge {bad}", judge_setting="openai", ended=f"Ended {bad}."
    )
    return render(report_of(store, attempt))


def data_of(page: Read) -> Any:
    [data] = [text for tag, attributes, text in page.inside if attributes.get("id") == "samples"]
    return json.loads(data)


def test_it_holds_every_sample_and_nothing_of_the_training_rows(store: Store) -> None:
    page = render(report_of(store, compared(store, questions(100))))
    samples = data_of(read(page))["samples"]
    assert [sample["messages"][0]["content"] for sample in samples] == [f"Where is parcel {n}?" for n in range(100)]
    assert samples[5]["outcome"] == "lost"
    assert (samples[7]["agreed"], samples[7]["candidate_first"], samples[7]["incumbent_first"]) == (
        *(False, "candidate", "incumbent"),
    )
    assert samples[0]["candidate"]["ratings"] == {"correctness": 9.0, "completeness": 9.0, "style": 9.0}
    assert "learned-" not in page


def test_it_says_what_the_report_says(store: Store) -> None:
    report = report_of(store, compared(store, questions(96), warnings=["capture_source_moved"]))
    text = " ".join(read(render(report)).text.split())
    assert report.result.verdict == "inconclusive"
    assert "Inconclusive against the base model" in text
    assert report.result.sentence in text
    for bar in report.result.bars:
        assert bar.what in text
    for caution in report.warnings:
        assert caution.sentence in text
    for said in (
        "at least 100",
        "96 of 96",
        "not a language model",
        "An older sample has the same prompt",
        "1 min 15 s",
    ):
        assert said in text
    for event in report.timeline:
        assert event.sentence in text


def test_a_version_is_named_as_what_it_was_compared_with(store: Store) -> None:
    page = render(report_of(store, compared(store, questions(100), live_version=3)))
    assert "<h1>Better than v3</h1>" in page


def test_nothing_on_it_leads_anywhere_else(hostile: str) -> None:
    page = read(hostile)
    for tag, attributes in page.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "audio", "video", "source", "use", "image"), tag
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "action")], tag
        href = attributes.get("href") or "#"
        assert href.startswith("#") or href == "data:,", href
    [style] = [text for tag, _, text in page.inside if tag == "style"]
    assert "url(" not in style
    assert "@import" not in style
    script = page.inside[-1][2]
    for way_out in ("fetch(", "XMLHttpRequest", "WebSocket", "import(", "innerHTML", "eval(", "document.write"):
        assert way_out not in script
    outside = hostile.replace(next(text for _, found, text in page.inside if found.get("id") == "samples"), "")
    assert not re.search(r"https?://", outside.replace("http-equiv", ""))


def test_only_its_own_script_and_style_may_run(hostile: str) -> None:
    page = read(hostile)
    kinds = [(tag, attributes.get("type")) for tag, attributes, _ in page.inside]
    assert kinds == [("style", None), ("script", "application/json"), ("script", None)]
    [policy] = [found["content"] for _, found in page.elements if found.get("http-equiv") == "Content-Security-Policy"]
    assert policy == content_security_policy()
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    for name, text in (("style-src", page.inside[0][2]), ("script-src", page.inside[2][2])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}';" in policy
    assert "unsafe" not in policy
    position = [tag for tag, found in page.elements if "http-equiv" in found or tag in ("style", "script")]
    assert position[0] == "meta"  # before anything that it must hold back


def test_every_text_comes_through_to_the_letter(hostile: str) -> None:
    data = data_of(read(hostile))
    samples = data["samples"]
    for text, sample in zip(HOSTILE, samples, strict=False):
        assert sample["messages"][0]["content"] == text
        for message in (sample["right_answer"], sample["candidate"]["answer"], sample["incumbent"]["answer"]):
            assert message["content"] == text
        assert json.loads(data["tools"][sample["tools"]])[0]["function"]["description"] == text
    assert samples[-1]["messages"][0]["role"] == "<b>"
    hostile.encode()  # half a pair has become an escape


def test_the_same_report_gives_the_same_page(store: Store) -> None:
    attempt = compared(store, questions(20))
    assert render(report_of(store, attempt)) == render(report_of(store, attempt))


def test_labels_ids_and_landmarks_hold_together(store: Store) -> None:
    page = read(render(report_of(store, compared(store, questions(10)))))
    ids = [found["id"] for _, found in page.elements if "id" in found]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for name in ("aria-labelledby", "for"):
            assert attributes.get(name, ids[0]) in ids
        href = attributes.get("href") or ""
        assert not href.startswith("#") or href[1:] in ids, href
    assert dict(page.elements)["html"] == {"lang": "en"}
    tags = [tag for tag, _ in page.elements]
    assert [tags.count(tag) for tag in ("main", "h1", "header", "footer", "nav")] == [1, 1, 1, 1, 1]
    heads = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in pairwise(heads))
    for tag, attributes in page.elements:
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or attributes.get("aria-label")


def test_empty_parts_are_said_not_drawn(store: Store) -> None:
    report = report_of(store, compared(store, [Question(status="gone")] * 2))
    text = " ".join(read(render(report)).text.split())
    assert "No sample was scored." in text
    assert "none was decided" in text
    assert "Not asked (2)" in text


@pytest.mark.parametrize("points", [(Point(0, 0.0, None),), (Point(5, None, 1e-9),), (Point(7, 1e12, 3.0),)])
@pytest.mark.parametrize("kept", [None, 0, 5, 10**6])
def test_any_curve_lies_between_its_axes(points: tuple[Point, ...], kept: int | None) -> None:
    chart = curve_chart(points, kept)
    assert chart is not None
    places = [tuple(map(float, place.split(","))) for place in f"{chart.train} {chart.check}".split()]
    assert places
    for x, y in places:
        assert (LEFT <= x <= RIGHT, TOP <= y <= BOTTOM) == (True, True), (x, y)
    for tick in chart.x_ticks:
        assert LEFT <= tick.at <= RIGHT
    assert 2 <= len(chart.y_ticks) <= 10
    assert chart.kept is None or LEFT <= chart.kept <= RIGHT


def test_without_points_there_is_no_curve() -> None:
    assert curve_chart([], 3) is None
    assert curve_chart([Point(1, None, None)], 1) is None


def test_1500_samples_are_gathered_and_drawn_in_seconds(store: Store) -> None:
    attempt = compared(store, questions(1500))
    started = time.perf_counter()
    page = render(report_of(store, attempt))
    assert time.perf_counter() - started < 5
    assert len(data_of(read(page))["samples"]) == 1500
    assert len(page) < 1500 * 1500
