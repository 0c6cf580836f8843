"""The made-up companies: same bytes from the same seed, prompts that stay apart, and enough of them for one attempt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml

from loop_dagster.rules.canonical import prompt_keys, prompt_text
from loop_dagster.rules.pipelines import TrainingSettings
from loop_dagster.rules.redaction import redact

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = EXAMPLES / "make_company.py"
COMPANIES = ("marrow-and-finch", "gullen-ferries")


def generate(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False)


def pairs(text: str) -> list[tuple[str, str]]:
    """(prompt, answer) of each line, each line being exactly one question and its answer."""
    found = []
    for line in text.splitlines():
        row = json.loads(line)
        assert list(row) == ["messages"]
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        found.append((user["content"], assistant["content"]))
    return found


def folded(text: str) -> str:
    return "".join(sign for sign in text.casefold() if sign.isalnum())


def test_the_committed_files_are_what_the_script_writes(tmp_path: Path) -> None:
    out, unseen = tmp_path / "company.jsonl", tmp_path / "unseen.jsonl"
    assert generate("--out", str(out), "--unseen", str(unseen)).returncode == 0
    assert out.read_bytes() == (EXAMPLES / "company.jsonl").read_bytes()
    assert unseen.read_bytes() == (EXAMPLES / "company_unseen.jsonl").read_bytes()


@pytest.mark.parametrize("company", COMPANIES)
def test_a_company_gives_1100_different_prompts_of_44_facts(company: str, tmp_path: Path) -> None:
    unseen, reworded = tmp_path / "unseen.jsonl", tmp_path / "reworded.jsonl"
    made = pairs(generate("--company", company, "--unseen", str(unseen), "--reworded", str(reworded)).stdout)

    assert len(made) == 1_100
    prompts = {folded(prompt) for prompt, _ in made}
    assert len(prompts) == 1_100
    answers = [answer for _, answer in made]
    assert {answers.count(answer) for answer in answers} == {25}

    for path in (unseen, reworded):
        asked_later = pairs(path.read_text(encoding="utf-8"))
        assert len({folded(prompt) for prompt, _ in asked_later} - prompts) == len(asked_later) == 44
        assert {answer for _, answer in asked_later} == set(answers)
    assert len({folded(answer) for answer in answers}) == 44
    assert all(5 <= len(answer.split()) <= 20 for answer in answers)


@pytest.mark.parametrize("company", COMPANIES)
def test_the_loop_keeps_every_word_and_finds_no_twins(company: str) -> None:
    made = pairs(generate("--company", company).stdout)
    prompts = pl.Series([prompt_text([{"role": "user", "content": prompt}]) for prompt, _ in made])
    assert prompt_keys(prompts).n_unique() == 1_100
    for prompt, answer in made:
        assert redact(prompt) == (prompt, {})
        assert redact(answer) == (answer, {})


def test_the_companies_share_no_prompt_and_no_answer() -> None:
    first, second = (pairs(generate("--company", company).stdout) for company in COMPANIES)
    assert {answer for _, answer in first}.isdisjoint(answer for _, answer in second)
    assert {folded(prompt) for prompt, _ in first}.isdisjoint(folded(prompt) for prompt, _ in second)


def test_the_seed_chooses_other_phrasings_of_the_same_facts() -> None:
    first, second = (pairs(generate("--seed", seed).stdout) for seed in ("1", "2"))
    assert first != second
    assert {answer for _, answer in first} == {answer for _, answer in second}
    assert {prompt for prompt, _ in first} != {prompt for prompt, _ in second}


def test_fewer_facts_and_phrasings() -> None:
    made = pairs(generate("--facts", "3", "--phrasings", "7").stdout)
    assert len(made) == 21
    assert len({answer for _, answer in made}) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--facts", "45"], "has 44 facts, 45 were asked for"),
        (["--phrasings", "500"], "500 were asked for: add wordings"),
        (["--company", "nobody"], "Known companies: gullen-ferries, marrow-and-finch"),
    ],
)
def test_what_a_company_cannot_give_is_said(options: list[str], said: str) -> None:
    done = generate(*options)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "not valid TOML"),
        ('name = "x"\n[[fact]]\nid = "a"\nanswer = "b"\nask = ["Why?"]\n', "the key 'topic' is missing"),
    ],
)
def test_a_broken_company_file_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text, encoding="utf-8")
    done = generate("--company", str(path))
    assert done.returncode == 2
    assert "broken.toml" in done.stderr
    assert said in done.stderr


def test_the_pipeline_file_is_plain_yaml_with_its_own_training_settings() -> None:
    pipeline = yaml.safe_load((EXAMPLES / "pipeline.yaml").read_text(encoding="utf-8"))
    assert pipeline["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    settings = TrainingSettings.model_validate(pipeline["training"])
    assert settings.epochs is not None
    assert settings.learning_rate is not None
