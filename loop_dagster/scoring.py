"""Scores what nobody reviewed, for a pipeline that is short of what its next attempt needs (rules.md).

Belongs here: what the scoring run, its sensor, the API and the command line share: what there is to do, a chunk with
its journal, what a killed run left. Does not belong here: the rules (rules/scoring.py), the judge (models/), storing
(store/scorings.py), runs of Dagster (assets/scores.py).

A chunk, so that a kill at any line pays for nothing twice and loses no verdict:

    1. a note of the chunk (its id, which samples stand behind which key, the prices) in the pipeline's scoring folder
    2. the calls, each in a journal beside it
    3. scores, money and the chunk's id in one transaction
    4. note and journal are removed; whoever finds them first does 3 and 4 from them, without asking anybody
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import polars as pl
from uuid_utils import uuid7

from loop_dagster.errors import BadRequest, JudgeUnavailable, LeaseLost, NotFound
from loop_dagster.models.judge import Case, Judge, cannot_rate_alone, judge_key, open_judge, why_no_scoring
from loop_dagster.models.judge_calls import Budget
from loop_dagster.models.judge_unreviewed import Rated, Unreviewed, rate_unreviewed, read_back
from loop_dagster.opening import MODEL_ERRORS, base_of, length_of
from loop_dagster.rules.feedback import COLUMNS, PICK_SCORE
from loop_dagster.rules.money import Prices, in_dollars, sample_limit
from loop_dagster.rules.scoring import (
    WINDOW,
    Facts,
    Hold,
    Standing,
    askable,
    chunk_size,
    hold_until,
    known_to,
    picked,
    standing,
    supposed,
    worth_asking,
)
from loop_dagster.rules.selection import Selection
from loop_dagster.rules.states import is_terminal
from loop_dagster.settings import Settings
from loop_dagster.store.leases import HeldLease
from loop_dagster.store.open import Store
from loop_dagster.store.pipelines import Pipeline
from loop_dagster.store.samples import KeyFrames
from loop_dagster.store.scorings import SCORING_LIMIT, Chunk, Scoring
from loop_dagster.store.selecting import PAIR_SCHEMA, Length, measure
from loop_dagster.store.work import scoring_folder
from loop_dagster.wire import timestamp

#: One run scores at a time in a workspace: the judge's concurrency is the installation's, and pipelines share samples.
LEASE: Final = "scoring"
#: Seconds after which a run ends at its next chunk, so that other pipelines have their turn (ours).
TURN_S: Final = 900.0
#: Seconds between two looks whether the pipeline still wants its samples scored.
LOOK_S: Final = 2.0
#: Judge cannot be opened as the settings say.
_SETTING: Final = "JUDGE_SETTING"

Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to score for a pipeline at one moment.

    `todo`: samples worth asking about, the newest first, with the key of the answer. `uncounted`: pairs whose length
    nobody has counted, which are too long until somebody has.
    """

    standing: Standing
    short: int = 0
    todo: pl.DataFrame = dataclasses.field(default_factory=lambda: pl.DataFrame(schema=PAIR_SCHEMA))
    uncounted: pl.DataFrame = dataclasses.field(default_factory=lambda: pl.DataFrame(schema=PAIR_SCHEMA))
    length: Length | None = None


@dataclass(slots=True)
class Done:
    """What one run did: samples scored, picked and failed, and what that cost; `standing` at its end."""

    scored: int = 0
    picked: int = 0
    failed: int = 0
    calls: int = 0
    nanocents: int = 0
    standing: Standing | None = None


def utc_now() -> datetime:
    return datetime.now(UTC)


# --- what there is to do ---------------------------------------------------------------------------------------------


def plan(store: Store, pipeline: Pipeline, now: datetime, *, keys: KeyFrames | None = None) -> Plan:
    """What there is to score. Reads no table while something that is cheap to see keeps it from being wanted.

    `keys` are frames that a pass over many pipelines read once.
    """
    facts = _facts(store, pipeline)
    early = standing(facts, now)
    if early.status != "scoring":
        return Plan(early)
    try:
        length = length_of(store, base_of(store, pipeline))
    except MODEL_ERRORS as error:
        return Plan(Standing("held", error.message))
    keys = keys or store.samples.keys().held()
    selection = measure(store, pipeline, length, now, keys=keys).selection
    facts = dataclasses.replace(facts, minimum=selection.minimum)
    if selection.ready:
        return Plan(standing(facts, now))
    return _worth(store, pipeline, now, keys=keys, selection=selection, length=length, facts=facts)


def _worth(
    store: Store,
    pipeline: Pipeline,
    now: datetime,
    *,
    keys: KeyFrames,
    selection: Selection,
    length: Length,
    facts: Facts,
) -> Plan:
    """The plan of a pipeline that is short: what would count if the judge picked all that it may be asked about."""
    asked = store.scorings.asked(judge_key(store.settings), now)
    may, known = askable(selection.rows, asked), known_to(selection.rows, asked)
    among = pl.col("sample_id").is_in(may.implode()) | pl.col("sample_id").is_in(known.implode())
    samples = keys.samples.filter(among).select("sample_id", "created_at", "text_key", "answer_key").collect()
    newest = samples.filter(pl.col("sample_id").is_in(may.implode())).sort("created_at", "sample_id", descending=True)[
        "sample_id"
    ]
    feedback = keys.feedback.select(*COLUMNS, "right_bytes")
    found = Plan(standing(facts, now), selection.minimum.short, length=length)
    for count in (WINDOW, len(newest)):
        ids = newest.head(count)
        would = dataclasses.replace(keys, feedback=pl.concat([feedback, supposed(ids, now).lazy()]))
        then = measure(store, pipeline, length, now, keys=would)
        todo = worth_asking(then.selection.rows, ids, samples, known=known)
        uncounted = then.uncounted.filter(pl.col("sample_id").is_in(ids.implode()))
        found = dataclasses.replace(found, todo=todo, uncounted=uncounted)
        if todo.height or uncounted.height or count >= len(newest):
            break
    left = found.todo.height + found.uncounted.height
    return dataclasses.replace(found, standing=standing(dataclasses.replace(facts, left=left), now))


def _facts(store: Store, pipeline: Pipeline, scoring: Scoring | None = None) -> Facts:
    """What is cheap to see: nothing of it reads the lake."""
    settings = pipeline.settings
    newest = store.attempts.newest().get(pipeline.pipeline_id)
    limit = settings.max_versions
    words = settings.conditions.feedback
    scoring = scoring or store.scorings.get(pipeline.pipeline_id)
    return Facts(
        enabled=settings.auto_scoring,
        paused=not pipeline.enabled,
        complete=limit is not None and len(store.versions.list(pipeline.pipeline_id)) >= limit,
        active=newest[0] if newest is not None and not is_terminal(newest[1]) else None,
        leaves_out=bool(words) and "unreviewed" not in words,
        cannot=why_no_scoring(store.settings),
        hold=scoring.held(hold_key(store.settings, pipeline)),
    )


def hold_key(settings: Settings, pipeline: Pipeline) -> str:
    """What a hold is about: when any of it changes, the judge is tried at once."""
    prices = [settings.judge_input_cents_per_million, settings.judge_output_cents_per_million]
    judge = [settings.judge, settings.judge_url, settings.judge_model, settings.judge_max_tokens]
    told = json.dumps([*judge, *map(str, prices), settings.scoring_limit_cents, pipeline.revision])
    return hashlib.sha256(told.encode()).hexdigest()


def described(
    store: Store, pipeline: Pipeline, selection: Selection, now: datetime, *, exact: bool = True
) -> dict[str, Any]:
    """`PipelineAutoScoring`: where it stands, and the pipeline's unreviewed samples by what the judge said of them.

    With `exact`, whether anything is left that is worth asking about is looked up; without, every unscored sample is.
    """
    unreviewed = selection.rows.filter(~pl.col("reviewed"))
    picks = unreviewed.filter(pl.col("teaches") == "scored").height
    below = unreviewed.filter(pl.col("reason") == "below_bar").height
    unscored = unreviewed.height - picks - below
    facts = dataclasses.replace(_facts(store, pipeline), minimum=selection.minimum, left=unscored)
    found = standing(facts, now)
    if exact and found.status == "scoring":
        found = plan(store, pipeline, now).standing
    return {
        "enabled": pipeline.settings.auto_scoring,
        "status": found.status,
        "threshold": PICK_SCORE,
        "picked": picks,
        "below_bar": below,
        "unscored": unscored,
        "held_until": timestamp(found.held_until),
        "message": found.message,
    }


def wanted(store: Store, now: datetime) -> list[Pipeline]:
    """Pipelines for which a run would do something at `now`."""
    left = leftovers(store)
    return [
        pipeline
        for pipeline in store.pipelines.list()
        if pipeline.pipeline_id in left or plan(store, pipeline, now).standing.status == "scoring"
    ]


# --- a run -----------------------------------------------------------------------------------------------------------


def score(
    store: Store,
    pipeline_id: str,
    *,
    lease: HeldLease,
    count_long: Callable[[Pipeline, Length, pl.DataFrame], None],
    clock: Clock = utc_now,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Done:
    """Score for one pipeline until it has enough, nothing is left, something holds it, or its turn is over.

    `lease` is held by the caller; nothing is stored without it. `count_long` counts the tokens of such pairs.
    """
    done = Done()
    settle(store, pipeline_id, lease=lease, clock=clock, done=done)
    began, judge, counted = time.monotonic(), None, False
    while True:
        try:
            pipeline = store.pipelines.get(pipeline_id)
        except NotFound:  # deleted meanwhile
            return done
        found = plan(store, pipeline, clock())
        done.standing = found.standing
        if found.uncounted.height and found.length is not None and not counted:
            count_long(pipeline, found.length, found.uncounted)
            counted = True
            continue
        over = time.monotonic() - began > TURN_S or not may_go_on()
        if found.standing.status != "scoring" or found.todo.is_empty() or over:
            return done
        judge = judge or _opened(store, pipeline, clock)
        if judge is not None:
            size = chunk_size(found.short, at_once=judge.concurrency)
            wants = _Wanted(store, pipeline, lambda: lease_is_ours(lease) and may_go_on())
            _chunk(store, pipeline, judge, found.todo.head(size), lease=lease, clock=clock, wants=wants, done=done)


def _opened(store: Store, pipeline: Pipeline, clock: Clock) -> Judge | None:
    """The judge of the settings; None, with a hold, when it cannot be opened or cannot rate without a right answer."""
    try:
        judge = open_judge(store.settings)
    except BadRequest as error:
        _hold(store, pipeline, _SETTING, error.message, clock)
        return None
    if cannot_rate_alone(judge):
        said = f"The judge {judge.name} rates nothing without a right answer, so it cannot score unreviewed samples."
        _hold(store, pipeline, _SETTING, said, clock)
        return None
    return judge


def _chunk(
    store: Store,
    pipeline: Pipeline,
    judge: Judge,
    todo: pl.DataFrame,
    *,
    lease: HeldLease,
    clock: Clock,
    wants: Callable[[], bool],
    done: Done,
) -> None:
    """Ask about one chunk, store what came of it, and note what holds the next one."""
    texts = store.samples.lesson_texts(todo)
    samples = [_unreviewed(row) for row in texts.iter_rows(named=True)]
    keys = {one.key(judge): one.case.sample_id for one in samples}
    prices = _prices(store.settings)
    noted = _Noted(str(uuid7()), judge_key(store.settings), keys, prices)
    folder = scoring_folder(store, pipeline.pipeline_id)
    noted.write(folder)
    left = sample_limit(store.settings.scoring_limit_cents) - store.scorings.get(pipeline.pipeline_id).nanocents
    budget = Budget(prices=prices, limit=max(0, left))
    rated = rate_unreviewed(judge, samples, journal=noted.journal(folder), budget=budget, may_go_on=wants)
    lease.verify()
    _keep(store, pipeline.pipeline_id, noted, rated, clock=clock, done=done)
    noted.remove(folder)
    if rated.gone is not None:
        said = (rated.ended or "").partition(" Mend it;")[0].removesuffix(" it was given up.").rstrip(".;")
        _hold(store, pipeline, rated.gone, f"{said}.", clock)
    elif rated.stopped is not None:
        _hold_for_money(store, pipeline, clock)
    elif not rated.scores and rated.failed:
        [(code, _count)] = Counter(rated.failed.values()).most_common(1)
        said = f"The judge {judge.name} gave no score for any of {len(rated.failed):,} samples ({code})."
        _hold(store, pipeline, code, said, clock)


def _unreviewed(row: Mapping[str, Any]) -> Unreviewed:
    """A row of `lesson_texts`: its own answer stands where the right answer would, and the judge gets none."""
    case = Case.from_row({**row, "right_answer": None})
    return Unreviewed(case, json.loads(row["right_answer"]))


def _keep(store: Store, pipeline_id: str, noted: _Noted, rated: Rated, *, clock: Clock, done: Done) -> None:
    """Store a chunk once. A judge that is away says nothing about a sample, unless it rated others meanwhile."""
    away = JudgeUnavailable.code
    failed = [one for one, code in rated.failed.items() if code != away or rated.scores]
    cost = noted.prices.cost(input_tokens=rated.total.prompt_tokens, output_tokens=rated.total.answer_tokens)
    chunk = Chunk(
        chunk_id=noted.chunk_id, judge_key=noted.judge_key, scores=rated.scores, failed=failed, nanocents=cost
    )
    if store.scorings.keep(pipeline_id, chunk, now=clock()):
        done.scored += len(rated.scores)
        done.picked += sum(picked(score) for score in rated.scores.values())
        done.failed += len(failed)
        done.calls += rated.total.calls
        done.nanocents += cost


def note_broken(store: Store, pipeline: Pipeline, code: str, said: str, clock: Clock = utc_now) -> None:
    """Note that a run broke off for a reason that is not the judge's, so that it is not repeated without a pause."""
    _hold(store, pipeline, code, said, clock)


def _hold(store: Store, pipeline: Pipeline, code: str, said: str, clock: Clock) -> None:
    now = clock()
    until = hold_until(store.scorings.get(pipeline.pipeline_id).failures + 1, now)
    again = f"It is asked again at {until:%H:%M} UTC, or as soon as the judge's settings or the pipeline are changed."
    key = hold_key(store.settings, pipeline)
    store.scorings.hold(pipeline.pipeline_id, Hold(code, f"{said} {again}", until), key=key, now=now)


def _hold_for_money(store: Store, pipeline: Pipeline, clock: Clock) -> None:
    limit = in_dollars(sample_limit(store.settings.scoring_limit_cents))
    spent = in_dollars(store.scorings.get(pipeline.pipeline_id).nanocents)
    said = (
        f"Scoring unreviewed samples for one attempt may cost {limit}, and {spent} are spent: the next call could pass "
        "it. Review samples, or raise LOOP_SCORING_LIMIT_CENTS, of which it may take 40 %."
    )
    key = hold_key(store.settings, pipeline)
    store.scorings.hold(pipeline.pipeline_id, Hold(SCORING_LIMIT, said), key=key, now=clock(), failed=False)


def lease_is_ours(lease: HeldLease) -> bool:
    """Whether the run still may write; costs nothing."""
    try:
        lease.check()
    except LeaseLost:
        return False
    return True


class _Wanted:
    """Whether a chunk may go on: the lease is held, the pipeline is on and wants it, and no attempt has opened."""

    def __init__(self, store: Store, pipeline: Pipeline, may_go_on: Callable[[], bool]) -> None:
        self._store, self._pipeline_id, self._may_go_on = store, pipeline.pipeline_id, may_go_on
        self._looked_at, self._answer = time.monotonic(), True

    def __call__(self) -> bool:
        if not self._may_go_on():
            return False
        if time.monotonic() - self._looked_at > LOOK_S:
            self._looked_at, self._answer = time.monotonic(), self._look()
        return self._answer

    def _look(self) -> bool:
        try:
            pipeline = self._store.pipelines.get(self._pipeline_id)
        except NotFound:
            return False
        return standing(_facts(self._store, pipeline), utc_now()).status == "scoring"


# --- what a killed run left ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Noted:
    """The note of one chunk: no text, only which sample stands behind which key of the journal, and the prices."""

    chunk_id: str
    judge_key: str
    keys: Mapping[str, str]
    prices: Prices

    def journal(self, folder: Path) -> Path:
        return folder / f"{self.chunk_id}.jsonl"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        prices = {name: str(price) for name, price in dataclasses.asdict(self.prices).items()}
        told = {"chunk_id": self.chunk_id, "judge_key": self.judge_key, "keys": dict(self.keys), "prices": prices}
        half = folder / f".{self.chunk_id}.half"
        half.write_text(json.dumps(told), encoding="utf-8")
        half.replace(folder / f"{self.chunk_id}.json")

    def remove(self, folder: Path) -> None:
        self.journal(folder).unlink(missing_ok=True)
        (folder / f"{self.chunk_id}.json").unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> _Noted:
        told = json.loads(path.read_text(encoding="utf-8"))
        return cls(told["chunk_id"], told["judge_key"], told["keys"], Prices.from_text(told["prices"]))


def leftovers(store: Store) -> set[str]:
    """Ids of the pipelines for which a run has left a chunk that is not stored."""
    return {path.parent.name for path in scoring_folder(store, "-").parent.glob("*/*.json")}


def settle(store: Store, pipeline_id: str, *, lease: HeldLease, clock: Clock = utc_now, done: Done) -> int:
    """Store the verdicts and the money of chunks that a killed run left; asks nobody. Returns how many chunks."""
    folder = scoring_folder(store, pipeline_id)
    chunks = 0
    for path in sorted(folder.glob("*.json")):
        try:
            noted = _Noted.read(path)
        except (ValueError, KeyError, TypeError):  # torn by more than a kill: nobody can say what its journal is about
            path.unlink()
            continue
        rated = read_back(noted.journal(folder), noted.keys)
        lease.verify()
        _keep(store, pipeline_id, noted, rated, clock=clock, done=done)
        noted.remove(folder)
        chunks += 1
    return chunks


def _prices(settings: Settings) -> Prices:
    return Prices(
        input_cents_per_million=settings.judge_input_cents_per_million,
        output_cents_per_million=settings.judge_output_cents_per_million,
    )
