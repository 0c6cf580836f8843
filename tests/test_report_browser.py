"""The report page in a real Chromium: its script draws and filters, hostile texts stay texts, nothing leaves.

Skipped where no Chromium that starts is on the path; test_report_page.py checks the file itself everywhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from report_world import Question, compared, questions
from test_report_page import HOSTILE, Read, read

from loop_dagster.report_data import report_of
from loop_dagster.report_page import render
from loop_dagster.settings import Settings
from loop_dagster.store.open import open_store

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--virtual-time-budget=4000", "--timeout=60000", "--enable-logging=stderr"),
)
Browse = Callable[..., Read]


@pytest.fixture(scope="module")
def chromium() -> str:
    """Path of a Chromium that starts; some systems have a stub of that name, which only says how to install one."""
    for name in NAMES:
        found = shutil.which(name)
        if found is None:
            continue
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False)
        if said.returncode == 0 and "Chrom" in said.stdout:
            return found
    pytest.skip(f"no browser that starts is on the path: looked for {', '.join(NAMES)}")


class Outside:
    """A proxy that answers nothing and remembers which hosts a browser asked for."""

    def __init__(self) -> None:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                line = self.rfile.readline(4096).decode("latin-1").split()
                if len(line) > 1:
                    asked.append(line[1])
                self.close_connection = True

        self.asked = asked
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def hosts(self) -> list[str]:
        """What was asked for, without the browser's own maker."""
        return [url for url in self.asked if not re.search(r"\b(google|googleapis|gstatic|gvt1)\.com\b", url)]


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    proxy = Outside()
    yield proxy
    proxy.server.shutdown()
    proxy.server.server_close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `plain.html` (200 ordinary samples), `hostile.html` and `leaky.html`, which is no page of ours."""
    folder = tmp_path_factory.mktemp("pages")
    store = open_store(Settings(home=tmp_path_factory.mktemp("home")))
    odd = [
        Question(candidate=None, prompt="Nobody answered ÉCLAIR."),
        Question(status="failed", error_code="JUDGE_UNREADABLE"),
        Question(status="gone"),
        replace(questions(1)[0], right=None, prompt="A riddle without a right answer"),
    ]
    plain = compared(store, [*questions(196), *odd], name="Plain")
    (folder / "plain.html").write_text(render(report_of(store, plain)), encoding="utf-8")
    asked = [Question(prompt=text, right=text, candidate=text, incumbent=text) for text in HOSTILE]
    bad = "<script>document.title = 'owned'</script>"
    hostile = compared(store, asked, name=f"Hostile {bad}", judge=bad, judge_setting="openai")
    (folder / "hostile.html").write_text(render(report_of(store, hostile)), encoding="utf-8")
    (folder / "leaky.html").write_text("<img src='http://leak.test/picture'>", encoding="utf-8")
    return folder


@pytest.fixture
def browse(chromium: str, pages: Path, outside: Outside, tmp_path: Path) -> Browse:
    """Opens a page in a browser whose every way out is the proxy; returns what the page has become."""

    def run(name: str, fragment: str = "", *flags: str) -> Read:
        done = subprocess.run(
            [
                *(chromium, *FLAGS, *flags, f"--user-data-dir={tmp_path / 'profile'}"),
                *(f"--proxy-server=127.0.0.1:{outside.server.server_port}", "--proxy-bypass-list=<-loopback>"),
                *("--dump-dom", f"file://{pages / name}{fragment}"),
            ],
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=120,
            check=True,
        )
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not said, said
        return read(done.stdout)

    return run


def shown(page: Read) -> list[int]:
    """Numbers of the samples that are drawn, in order."""
    return [
        int(found["id"][1:]) for tag, found in page.elements if tag == "h3" and str(found.get("id", "")).startswith("s")
    ]


@pytest.mark.parametrize(
    ("fragment", "count", "first"),
    [
        ("#scores", 200, 1),
        ("#outcome=lost&sort=worst", 25, 6),
        ("#outcome=tie&orders=differ", 24, 8),
        ("#outcome=unanswered&q=%C3%A9clair", 1, 197),
        ("#outcome=gone", 1, 199),
        ("#candidate=not&incumbent=passed", 24, 6),
        ("#reference=no", 1, 200),
        ("#q=parcel+17", 11, 18),
        ("#q=nothing+like+this", 0, None),
        ("#outcome=no-such-word&sort=longest", 200, 200),
    ],
)
def test_filters_and_orders(browse: Browse, fragment: str, count: int, first: int | None) -> None:
    page = browse("plain.html", fragment)
    assert f"{count} of 200 samples" in page.text
    numbers = shown(page)
    assert len(numbers) == min(count, 25)
    assert (numbers[0] if numbers else None) == first
    [more] = [found for tag, found in page.elements if found.get("id") == "more"]
    assert ("hidden" in more) == (count <= 25)


def test_a_sample_is_shown_whole(browse: Browse) -> None:
    text = " ".join(browse("plain.html", "#q=parcel+7").text.split())
    for said in (
        *("Where is parcel 7?", "Parcel 7 is on its way.", "A person marked this answer good.", "I cannot know."),
        *("Candidate read first: prefers the candidate", "Incumbent read first: prefers the incumbent"),
        *("The orders differ, so it is a tie", "correctness6 of 10", "score0.600 (not passed)", "sample-0007"),
    ):
        assert said in text
    text = " ".join(browse("plain.html", "#outcome=failed").text.split())
    assert "The judge's reply could not be read, twice." in text
    text = " ".join(browse("plain.html", "#outcome=unanswered").text.split())
    assert "The candidate gave no answer, which counts as a loss." in text
    assert "It answered with nothing." in text


def test_hostile_texts_are_shown_and_do_nothing(browse: Browse, outside: Outside) -> None:
    page = browse("hostile.html")
    assert len(shown(page)) == len(HOSTILE)
    assert page.text.strip().startswith("Hostile <script>document.title")  # the title is still the page's own
    for text in (HOSTILE[0], HOSTILE[1], HOSTILE[2], HOSTILE[3], HOSTILE[6]):
        assert page.text.count(text) >= 4, text
    for sign in ("U+202E", "U+2066", "U+2028", "U+0000", "U+001B", "U+D83D", "U+E0067"):
        assert sign in page.text
    assert not {"\u202e", "\u2066", "\u2028", "\x00"} & set(page.text)
    assert "Show all 100,000 characters" in page.text
    assert page.text.count("A" * 1000) < 100
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"img", "base", "i", "textarea"}
    assert [tag for tag, _, _ in page.inside] == ["style", "script", "script"]
    assert outside.hosts == []


def test_the_proxy_would_have_seen_a_request(browse: Browse, outside: Outside) -> None:
    browse("leaky.html")
    assert outside.hosts == ["http://leak.test/picture"]


def test_on_paper_everything_that_is_left_is_printed(chromium: str, pages: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.pdf"
    url = f"file://{pages / 'plain.html'}#outcome=tie"
    command = [*(chromium, *FLAGS), f"--user-data-dir={tmp_path / 'profile'}", f"--print-to-pdf={target}", url]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    # Half a page for each of the 49, behind what stands above them; the 25 that the screen begins with would be 19.
    assert len(re.findall(rb"/Type\s*/Page\b", target.read_bytes())) > 25
