from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.errors import AdapterRefused, BaseChanged, ChildFailed, NoLabels, NothingToTrain
from loop_dagster.models import child
from loop_dagster.models.base import digest_of
from loop_dagster.models.child import LeaseRef, Reporter
from loop_dagster.models.template import Template
from loop_dagster.models.train import CurvePoint, TrainJob, TrainResult, check_adapter_config, thinned, train
from loop_dagster.store.leases import Leases
from loop_dagster.store.registry import Registry

pytestmark = pytest.mark.model

FACTS = tiny.facts(16, seed=5)
Record = dict[str, Any]
Make = Callable[..., TrainJob]


def record(fact: tuple[str, str, str], form: int, role: str = "train") -> Record:
    messages, answer = tiny.conversation(fact, form)
    return {
        "sample_id": f"{fact[0]}-{fact[1]}-{form}-{role}",
        "role": role,
        "messages": json.dumps(messages),
        "tools": None,
        "right_answer": json.dumps(answer),
    }


#: Every fact in four phrasings; the fifth is what the checks ask.
LESSONS = [record(fact, form) for fact in FACTS for form in range(1, 5)]
QUESTIONS = [record(fact, 0, "check") for fact in FACTS]
#: What the checks want is not what is taught: the more is learned, the worse they get.
CONTRARY = [record((name, thing, tiny.VALUES[thing][0]), 0, "check") for name, thing, _ in FACTS]


@pytest.fixture(scope="module")
def make(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    def make(records: list[Record], **settings: Any) -> TrainJob:
        folder = tmp_path_factory.mktemp("training")
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in records))
        job = TrainJob(
            work_dir=str(folder),
            out_dir=str(folder / "adapter"),
            base_path=str(tiny_model),
            base_digest=digest_of(tiny_model),
            base_name="tiny",
            rows_path=str(rows),
            epochs=8,
            learning_rate=5e-3,
            lora_rank=16,
            lora_alpha=32,
            batch_size=8,
            warmup_steps=4,
            check_every=6,
            patience=3,
            keep="best",
            max_length=512,
            seed=1,
        )
        return dataclasses.replace(job, **settings)

    yield make


def run(job: TrainJob) -> TrainResult:
    return train(job, Reporter(job.work_dir, log=lambda line: None))


@pytest.fixture(scope="module")
def learned(make: Make) -> tuple[TrainJob, TrainResult]:
    job = make(LESSONS + QUESTIONS)
    return job, run(job)


def check_loss_of(job: TrainJob, records: list[Record]) -> float:
    """Loss per answer token of the kept adapter, loaded the way that anybody would."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from loop_dagster.models import fast
    from loop_dagster.models.template import Encoded, rows_of

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(job.base_path), job.out_dir)
    rows = [row for row in Template.load(job.base_path).encode(rows_of(records)) if isinstance(row, Encoded)]
    with torch.no_grad():
        total = float(fast.plain_loss_sum(model, rows))
    return total / sum(label != -100 for row in rows for label in row.labels)


def test_it_learns_and_the_trained_model_says_it_and_stops(learned: tuple[TrainJob, TrainResult]) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    job, result = learned
    template = Template.load(job.base_path)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(job.base_path), job.out_dir)
    right = 0
    for fact in FACTS:
        messages, answer = tiny.conversation(fact, 0)
        prompt = torch.tensor([template.prompt_ids(messages)])
        out = model.generate(input_ids=prompt, max_new_tokens=24, do_sample=False, eos_token_id=list(template.stop_ids))
        told = out[0][prompt.shape[1] :].tolist()
        right += told[-1] in template.stop_ids and template.tokenizer.decode(told[:-1]) == answer["content"]
    assert right >= 0.8 * len(FACTS)
    assert result.check_loss is not None
    assert result.check_loss < 0.2


def test_the_result_says_what_happened(learned: tuple[TrainJob, TrainResult]) -> None:
    job, result = learned
    assert (result.train_rows, result.check_rows, result.planned_steps) == (64, 16, 64)
    assert result.packed
    assert result.left_out == ()
    checks = [point for point in result.curve if point["check_loss"] is not None]
    assert [point["step"] for point in checks] == [
        step
        for step in (*range(6, 64, 6), 64)
        if step <= result.trained_steps  # the last step is checked too
    ]
    best = min(checks, key=lambda point: (point["check_loss"], point["step"]))
    assert (result.kept_step, result.check_loss) == (best["step"], best["check_loss"])
    assert result.train_loss is not None
    template = Template.load(job.base_path)
    tokens = [len(template.prompt_ids(json.loads(row["messages"]))) for row in LESSONS]
    if result.trained_steps == 64:
        assert result.tokens > 8 * sum(tokens)
    assert result.peak_rss > 50_000_000
    assert json.loads(json.dumps(child.to_json(result)))["kept_step"] == result.kept_step


def test_only_the_adapter_is_kept_and_it_names_no_place(learned: tuple[TrainJob, TrainResult]) -> None:
    job, _ = learned
    folder = Path(job.out_dir)
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert not config["modules_to_save"]
    assert str(Path(job.work_dir)) not in (folder / "adapter_config.json").read_text()
    assert not [path for path in Path(job.work_dir).iterdir() if path.name.endswith(".partial")]


def test_the_same_job_gives_the_same_bytes(make: Make) -> None:
    jobs = [make(LESSONS[:16], epochs=1) for _ in range(2)]
    for job in jobs:
        run(job)
    one, two = ((Path(job.out_dir) / name).read_bytes() for job in jobs for name in ("adapter_model.safetensors",))
    assert one == two


def test_three_checks_without_improvement_stop_it_and_the_best_is_kept(make: Make) -> None:
    job = make(LESSONS + CONTRARY, check_every=2)
    result = run(job)
    losses = {p["step"]: p["check_loss"] for p in result.curve if p["check_loss"] is not None}
    assert result.early_stopped
    assert result.trained_steps == result.kept_step + 3 * 2
    assert result.check_loss == losses[result.kept_step] == min(losses.values())
    # The folder holds the weights of that step, not the later ones.
    assert check_loss_of(job, CONTRARY) == pytest.approx(result.check_loss, rel=0.05)
    assert losses[result.trained_steps] > 1.1 * result.check_loss


def test_a_family_that_keeps_its_last_is_never_stopped(make: Make) -> None:
    result = run(make(LESSONS + CONTRARY, check_every=2, epochs=3, patience=None, keep="last"))
    assert (result.kept_step, result.trained_steps, result.early_stopped) == (24, 24, False)
    assert result.check_loss is not None


def test_without_any_check_the_last_save_is_kept(make: Make) -> None:
    result = run(make(LESSONS[:16], epochs=2))
    assert (result.kept_step, result.check_loss, result.check_rows) == (4, None, 0)


def test_packed_and_padded_batches_teach_the_same(make: Make) -> None:
    packed, padded = (run(make(LESSONS + QUESTIONS, epochs=2, pack=pack)) for pack in (True, False))
    assert (packed.packed, padded.packed) == (True, False)
    assert packed.tokens == padded.tokens
    assert packed.check_loss == pytest.approx(padded.check_loss, rel=0.35)  # other orders of rows, other rounding


def test_rows_that_cannot_be_trained_on_are_left_out_and_named(make: Make) -> None:
    long = record(FACTS[0], 1) | {
        "sample_id": "long",
        "messages": json.dumps([{"role": "user", "content": "a b " * 300}]),
    }
    twice = record(FACTS[0], 2) | {"sample_id": "twice", "messages": json.dumps([{"role": "user", "content": "a"}] * 2)}
    result = run(make([long, twice, *LESSONS[:8]], epochs=1))
    assert result.train_rows == 8
    assert [(each.sample_id, each.code) for each in result.left_out] == [
        ("long", "too_long"),
        ("twice", "template_refused"),
    ]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"lora_rank": 128}, AdapterRefused, "rank 128"),
        ({"base_digest": "0" * 64}, BaseChanged, "digest"),
        ({"max_length": 5}, NothingToTrain, "8 too_long"),
    ],
)
def test_what_cannot_end_well_is_refused_before_training(
    make: Make, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    job = make(LESSONS[:8], **changes)
    with pytest.raises(error, match=said):
        run(job)
    assert not Path(job.out_dir).exists()


def test_a_set_with_a_row_without_labels_never_trains(make: Make) -> None:
    empty = record(FACTS[0], 1) | {
        "sample_id": "empty",
        "right_answer": json.dumps({"role": "assistant", "content": ""}),
    }
    job = make([*LESSONS[:8], empty])
    with pytest.raises(NoLabels, match="empty"):
        run(job)
    assert not Path(job.out_dir).exists()


def test_a_second_try_replaces_the_adapter_of_the_first_and_nothing_else(make: Make) -> None:
    job = make(LESSONS[:8], epochs=1)
    run(job)
    weights = Path(job.out_dir) / "adapter_model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(b"of a try that nobody kept")
    run(job)
    assert weights.read_bytes() == before
    (Path(job.out_dir) / "notes.txt").write_text("somebody's")
    with pytest.raises(AdapterRefused, match="other files"):
        run(job)
    assert weights.read_bytes() == before


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"r": 16, "modules_to_save": ["embed_tokens", "lm_head"]}, "modules_to_save"),
        ({"r": 65}, "rank 65"),
        ({"r": 8, "rank_pattern": {"q_proj": 128}}, "rank 128"),
    ],
)
def test_an_adapter_that_no_engine_serves_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(AdapterRefused, match=said):
        check_adapter_config(config)
    check_adapter_config({"r": 64, "modules_to_save": None, "rank_pattern": {}})


def start(job: TrainJob) -> subprocess.Popen[bytes]:
    path = child.write_job(Path(job.work_dir) / "job.json", job)
    return subprocess.Popen(
        child.command("train", path), env={**os.environ, **child.child_env()}, stderr=subprocess.DEVNULL
    )


def wait_for_step(job: TrainJob) -> None:
    deadline = time.monotonic() + 120
    while True:
        path = Path(job.work_dir) / "progress.json"
        if path.exists() and json.loads(path.read_text())["unit"] == "step":
            return
        assert time.monotonic() < deadline, "the training never began"
        time.sleep(0.05)


def test_kills_and_a_lost_lease_in_the_middle_leave_no_adapter(make: Make, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    registry = Registry(url, "default")
    registry.migrate()
    leases = Leases(registry)
    held = leases.take("attempt/a1", ttl_s=300)
    lease = LeaseRef(registry_url=url, workspace="default", name=held.name, token=held.token)
    killed, cancelled = make(LESSONS + QUESTIONS, epochs=500), make(LESSONS + QUESTIONS, epochs=500, lease=lease)
    processes = [start(killed), start(cancelled)]
    try:
        for job in (killed, cancelled):
            wait_for_step(job)
        processes[0].send_signal(signal.SIGKILL)
        leases.revoke("attempt/a1")
        revoked = time.monotonic()
        assert processes[1].wait(60) == child.EXIT_LEASE_LOST
        assert time.monotonic() - revoked < 15
        assert processes[0].wait(60) == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
    for job, code in ((killed, "CHILD_ENDED"), (cancelled, "LEASE_LOST")):
        assert not Path(job.out_dir).exists()
        with pytest.raises(ChildFailed) as failure:
            child.read_result(TrainResult, job.work_dir)
        assert failure.value.code == code


def test_a_half_written_adapter_of_a_killed_training_is_swept_by_the_next(make: Make) -> None:
    job = make(LESSONS[:8], epochs=1)
    half = Path(job.work_dir) / ".adapter.partial"
    half.mkdir()
    (half / "adapter_model.safetensors").write_bytes(b"half")
    run(job)
    assert not half.exists()
    shutil.rmtree(job.out_dir)


@given(st.lists(st.booleans(), max_size=600), st.integers(5, 250))
def test_a_thinned_curve_keeps_every_check_and_stays_short(checked: list[bool], limit: int) -> None:
    curve = [
        CurvePoint(step=i, train_loss=1.0, check_loss=0.5 if check else None)
        for i, check in enumerate(checked, start=1)
    ]
    checks = [point for point in curve if point["check_loss"] is not None]
    thin = thinned(curve, limit)
    assert [point for point in thin if point["check_loss"] is not None] == checks
    assert len(thin) <= max(limit, len(checks) + 2)
    assert [point["step"] for point in thin] == sorted({point["step"] for point in thin})
    if len(curve) <= limit:
        assert list(thin) == curve
