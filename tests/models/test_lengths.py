from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_dagster.models import child
from loop_dagster.models.lengths import (
    REFUSED,
    LengthsJob,
    LengthsResult,
    Overhead,
    byte_bound,
    count,
    measure,
    safe_bytes,
    template_of,
)
from loop_dagster.models.template import Template

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
VALUE = st.recursive(
    TEXT | st.integers() | st.none(), lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3)
)


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> Template:
    return template_of(tiny_model)


@pytest.fixture(scope="module")
def overhead(template: Template) -> Overhead:
    return measure(template)


def canonical(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def record(turns: list[str], answer: str, tools: Any = None) -> dict[str, Any]:
    """A row as the lake holds it: canonical JSON."""
    messages = [{"content": text, "role": ("user", "assistant")[i % 2]} for i, text in enumerate(turns)]
    return {
        "sample_id": "s",
        "messages": canonical(messages),
        "tools": None if tools is None else canonical(tools),
        "right_answer": canonical({"content": answer, "role": "assistant"}),
    }


def size(row: dict[str, Any]) -> int:
    return sum(len(row[name].encode()) for name in ("messages", "tools", "right_answer") if row[name] is not None)


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=7).filter(lambda turns: len(turns) % 2 == 1), TEXT.filter(str.strip))
def test_no_row_within_the_bound_is_too_long(
    template: Template, overhead: Overhead, turns: list[str], answer: str
) -> None:
    row = record(turns, answer)
    [tokens] = count(template, [row])
    assert tokens != REFUSED
    # Were the training length one token shorter than this row, the bound must not let it pass.
    assert byte_bound(tokens - 1, overhead) < size(row)


@settings(max_examples=100, deadline=None)
@given(VALUE)
def test_tools_are_within_the_bound_too(template: Template, overhead: Overhead, value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"a": value}}}]
    row = record(["hi"], "yes", tools)
    [tokens] = count(template, [row])
    assert byte_bound(tokens - 1, overhead) < size(row)


def test_a_template_that_indents_tools_has_a_lower_bound(template: Template) -> None:
    tokenizer = copy.deepcopy(template.tokenizer)
    tokenizer.chat_template = tiny.TEMPLATE.replace("{{ tool | tojson }}", "{{ tool | tojson(indent=4) }}")
    assert tokenizer.chat_template != tiny.TEMPLATE
    indenting = Template(tokenizer)
    overhead = measure(indenting)
    schema: dict[str, Any] = {"type": "string"}
    for depth in range(6):
        schema = {"type": "object", "properties": {"x": schema, "y": {"type": "array", "items": {"type": "integer"}}}}
        row = record(
            ["hi"], "yes", [{"type": "function", "function": {"name": "f", "parameters": schema}}] * (depth + 1)
        )
        [tokens] = count(indenting, [row])
        assert byte_bound(tokens - 1, overhead) < size(row)
    assert tokens > size(row)  # more tokens than bytes: the bytes alone would have let it pass


def test_the_bound_spares_nearly_every_row_of_ordinary_length(template: Template, overhead: Overhead) -> None:
    row = record([tiny.conversation(("banek", "city", "Oslo"), 0)[0][0]["content"]], "The city of banek is Oslo.")
    assert byte_bound(8_192, overhead) > 20 * size(row)


@pytest.mark.parametrize(
    ("normaliser", "per_byte"),
    [(None, 1.0), ("NFC", 3.0), ("NFKC", None), ("NFD", None), ("Lowercase", 2.0), ("Replace", 1.0)],
)
def test_a_normaliser_that_makes_text_longer_raises_or_ends_the_bound(
    template: Template, overhead: Overhead, normaliser: str | None, per_byte: float | None
) -> None:
    from tokenizers import normalizers

    made = {
        None: None,
        "NFC": normalizers.NFC(),
        "NFKC": normalizers.NFKC(),
        "NFD": normalizers.Sequence([normalizers.NFC(), normalizers.NFD()]),
        "Lowercase": normalizers.Lowercase(),
        "Replace": normalizers.Replace(" ", "\u2581"),
    }[normaliser]
    tokenizer = copy.deepcopy(template.tokenizer)
    if made is not None:
        tokenizer.backend_tokenizer.normalizer = made
    found = measure(Template(tokenizer))
    if per_byte is None:
        assert found.per_byte is None
        assert byte_bound(8_192, found) == -1
    else:
        assert found.per_byte is not None
        assert found.per_byte >= per_byte


def test_a_training_length_below_the_templates_own_tokens_settles_nothing(overhead: Overhead) -> None:
    assert byte_bound(overhead.fixed - 1, overhead) == -1


def test_a_count_is_what_the_template_makes_of_it(template: Template) -> None:
    rows = [record(["hi"], "yes"), record(["hi", "yes", "and?"], "no"), record(["hi"], "  ")]
    refused = {**rows[0], "messages": canonical([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])}
    found = count(template, [*rows, refused])
    assert found[2:] == [REFUSED, REFUSED]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    assert found[0] == len(template.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert found[1] > found[0]


def test_what_was_measured_is_remembered_until_the_model_changes(tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    first = safe_bytes(folder, 512)
    cache = tmp_path / ".model.overhead.json"
    known = json.loads(cache.read_text())
    assert first == byte_bound(512, Overhead(fixed=known["fixed"], per_byte=known["per_byte"]))
    cache.write_text(json.dumps({**known, "fixed": known["fixed"] + 100}))
    assert safe_bytes(folder, 512) < first  # read from there
    jinja = folder / "chat_template.jinja"
    jinja.write_text("{#- another digest, the same text -#}" + jinja.read_text())
    assert safe_bytes(folder, 512) == first  # measured again


def test_a_child_counts_and_nothing_of_it_imports_torch(tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps(record(["hi"] if i % 2 else ["hello there"], "yes")) + "\n" for i in range(2_500))
    )
    out = tmp_path / "counts.json"
    job = LengthsJob(work_dir=str(tmp_path / "w"), base_path=str(tiny_model), rows_path=str(rows), out=str(out))
    child.write_job(tmp_path / "job.json", job)
    code = (
        "import sys; from loop_dagster.models import base, child, fast, lengths, probe, template, train;"
        "status = child.run(lengths.LengthsJob, lengths.count_all, sys.argv[1:]);"
        "sys.exit(99 if 'torch' in sys.modules else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "job.json")],
        env={**os.environ, **child.child_env()},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert child.read_result(LengthsResult, tmp_path / "w") == LengthsResult(rows=2_500, refused=0)
    counts = json.loads(out.read_text())
    assert len(counts) == 2_500
    assert counts[:2] == count(template_of(tiny_model), [record(["hello there"], "yes"), record(["hi"], "yes")])
