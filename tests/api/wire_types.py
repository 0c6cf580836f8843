"""Checks answers against the public client's TypedDicts, read from the installed package."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal, Union

import bios._types as declared

from loop_dagster.api.gaps import FIXED, LEFT_OUT, NULL_FOR_NOW


def conforms(value: Any, kind: Any, where: str = "") -> list[str]:
    """What of `value` is not as the type says: missing keys, values of another type, optional keys left out unsaid."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return []
    if typing.is_typeddict(kind):
        return _typed_dict(value, kind, where)
    if origin in (Union, types.UnionType):
        tries = [conforms(value, one, where) for one in typing.get_args(kind)]
        return [] if any(not found for found in tries) else min(tries, key=len)
    if origin is Literal:
        return [] if value in typing.get_args(kind) else [f"{where}: {value!r} is none of {typing.get_args(kind)}"]
    if origin is list:
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        [inner] = typing.get_args(kind)
        return [said for at, one in enumerate(value) for said in conforms(one, inner, f"{where}[{at}]")]
    if origin is dict:
        _key, inner = typing.get_args(kind)
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no object"]
        return [said for name, one in value.items() for said in conforms(one, inner, f"{where}.{name}")]
    wanted = (int, float) if kind is float else (kind,)
    fits = isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))
    return [] if fits else [f"{where}: {value!r} is no {getattr(kind, '__name__', kind)}"]


def _typed_dict(value: Any, kind: Any, where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no object"]
    name = kind.__name__
    hints = typing.get_type_hints(kind)
    said = [f"{where}: {name} lacks {key}" for key in sorted(kind.__required_keys__ - set(value))]
    if name in NULL_FOR_NOW or name in FIXED or name in LEFT_OUT or name.startswith(("Loop", "Pipeline", "Training")):
        unsaid = set(hints) - kind.__required_keys__ - set(value) - set(LEFT_OUT.get(name, ())) - _SOMETIMES
        said += [f"{where}: {name} leaves {key} out and gaps.py does not say so" for key in sorted(unsaid)]
    for key, hint in hints.items():
        if key in value:
            said += conforms(value[key], hint, f"{where}.{key}")
    return said


#: Keys that an answer has only where there is something: parts of a message, the state of a list with pipeline=.
_SOMETIMES = {"content", "tool_calls", "tool_call_id", "name", "id", "type", "workspace"}


def check(value: Any, name: str) -> None:
    """Assert that an answer is what the client declares under `name`."""
    said = conforms(value, getattr(declared, name), name)
    assert not said, "\n".join(said[:20])
