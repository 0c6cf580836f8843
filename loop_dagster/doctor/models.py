"""Base models: there, whole, as pinned, with a chat template that trains and serves.

Belongs here: each model that a pipeline, a live version or an attempt under way needs. Does not belong here: weights in
memory; nothing here imports torch, and no model is downloaded, converted or remembered.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loop_dagster.doctor.findings import Finding, fine, mistake, note, told
from loop_dagster.doctor.installation import Installation
from loop_dagster.errors import ModelNotTrainable
from loop_dagster.models.base import check_folder, digested_bytes, known_digest, place, read_digest
from loop_dagster.models.template import Row, RowRefusal, Template

#: A model whose digest is not remembered is read whole up to this size; a bigger one only when asked to.
READ_BYTES: Final = 1_000_000_000
_PROBE: Final = "zq_probe_9"
_CHAT: Final = [{"role": "user", "content": "a"}]
_ANSWER: Final = {"role": "assistant", "content": _PROBE}

#: model id → digest that is needed (None: not pinned yet) → who needs it
Needed = dict[str, dict[str | None, list[str]]]


def models(installation: Installation) -> Iterator[Finding]:
    """Every base model that something needs."""
    for model_id, digests in _needed(installation).items():
        who = ", ".join(sorted({name for names in digests.values() for name in names}))
        what = f"model of {who}"
        path = place(model_id, installation.known.models_dir)
        if path is None:
            yield note(
                "model_not_here",
                what,
                where=model_id,
                found="it is not on this machine yet: its first use downloads or converts it",
                mend="Nothing to do with a way to the hub. Without one, put the model into a folder and name that: "
                f"`loop pipelines edit {_a_tag(digests)} --model /its/folder`.",
            )
            continue
        try:
            check_folder(model_id, path)
        except ModelNotTrainable as error:
            yield _unfit(what, path, error.message)
            continue
        changed = list(_changed(installation, model_id, path, digests))
        yield from changed
        odd = list(template(path, what))
        yield from odd
        if not changed and not odd:
            yield fine("model", what, where=str(path), found="whole, as pinned, with a usable template")


def template(path: Path, what: str) -> Iterator[Finding]:
    """What is wrong with the chat template and the end token of a model folder; nothing when all is well.

    A pad token that is the end token too is well: rows are batched by length, and the end token keeps its label.
    """
    where = str(_template_file(path))
    try:
        loaded = Template.load(path)
        [found] = loaded.sizes([Row(key="probe", messages=_CHAT, answer=_ANSWER)]) if loaded.stop_ids else [0]
        shown = str(loaded.tokenizer.apply_chat_template([*_CHAT, _ANSWER], tokenize=False))
    except Exception as error:  # a tokenizer file or a template may be broken in any way
        yield mistake(
            "template_unusable",
            what,
            where=where,
            found=f"its tokenizer or chat template cannot be used ({type(error).__name__})",
            mend=f"Put the tokenizer's files of the original model back into {path}, or choose another model.",
        )
        return
    if isinstance(found, RowRefusal) or _PROBE not in shown:
        why = found.sentence if isinstance(found, RowRefusal) else "The template does not show what is said."
        yield mistake(
            "template_unusable",
            what,
            where=where,
            found=why,
            mend="Put the original chat template back, or choose the instruct variant of the model: with this one "
            "every sample would be refused.",
        )
        return
    after = loaded.tokenizer(shown.rpartition(_PROBE)[2], add_special_tokens=False)["input_ids"]
    if not loaded.stop_ids:
        yield mistake(
            "no_end_token",
            what,
            where=str(path / "tokenizer_config.json"),
            found="nothing says how an answer ends: no eos_token, none in generation_config.json, none in the template",
            mend='Name the token that ends a turn of this model: `"eos_token": "<|im_end|>"` in tokenizer_config.json, '
            "then pin the folder again: `loop pipelines edit TAG --model FOLDER`.",
        )
    elif not set(after) & set(loaded.stop_ids):
        ends = " or ".join(loaded.tokenizer.decode([one]) for one in loaded.stop_ids)
        yield mistake(
            "template_without_end_token",
            what,
            where=where,
            found=f"the chat template puts no end token after an answer; the model's is {ends}",
            mend=f"Let the template write {ends} after the assistant's content (the original model's does), then pin "
            "the folder again: `loop pipelines edit TAG --model FOLDER`.",
        )


def _needed(installation: Installation) -> Needed:
    store = installation.store
    needed: Needed = defaultdict(lambda: defaultdict(list))
    for pipeline in store.pipelines.list():
        needed[pipeline.model_id][pipeline.model_digest].append(pipeline.tag)
    for tag, version in store.versions.all_live().items():
        model_id = store.attempts.get(version.run_id).frozen.get("model_id")
        if model_id is not None:
            needed[model_id][version.base_digest].append(f"loop-{tag}")
    for attempt in store.attempts.active():
        model_id, digest = attempt.frozen.get("model_id"), attempt.frozen.get("base_digest")
        if model_id is not None and digest is not None:
            needed[model_id][digest].append(f"attempt {attempt.key}")
    return needed


def _changed(
    installation: Installation, model_id: str, path: Path, digests: dict[str | None, list[str]]
) -> Iterator[Finding]:
    pinned = {digest: names for digest, names in digests.items() if digest is not None}
    if not pinned:
        return
    found = known_digest(path)
    if found is None and not installation.thorough and digested_bytes(path) > READ_BYTES:
        yield note(
            "model_not_read",
            f"model of {', '.join(name for names in pinned.values() for name in names)}",
            where=str(path),
            found=f"its files are newer than what is remembered of them, and {digested_bytes(path) / 1e9:.0f} GB were "
            "not read",
            mend="`loop doctor --thorough` reads them and says whether they are the pinned ones.",
        )
        return
    found = found or read_digest(path)
    for digest, names in pinned.items():
        if digest != found:
            folder = shlex.quote(str(path))
            tags = [name for name in names if not name.startswith(("loop-", "attempt "))]
            again = f", or pin what is there now: `loop pipelines edit {tags[0]} --model {folder}`" if tags else ""
            yield mistake(
                "model_changed",
                f"model of {', '.join(names)}",
                where=str(path),
                found=f"its files have digest {found[:16]}, pinned is {digest[:16]}: adapters do not fit it",
                mend=f"Put the folder back as it was{again}. Until then nothing is trained or answered with it.",
            )


def _unfit(what: str, path: Path, message: str) -> Finding:
    if not path.is_dir():
        code = "model_missing"
    else:
        code = "template_missing" if "no chat template" in message else "model_incomplete"
    return told(code, what, message, where=str(path))


def _a_tag(digests: dict[str | None, list[str]]) -> str:
    names = [name for names in digests.values() for name in names if not name.startswith(("loop-", "attempt "))]
    return names[0] if names else "TAG"


def _template_file(path: Path) -> Path:
    file = path / "chat_template.jinja"
    return file if file.is_file() else path / "tokenizer_config.json"
