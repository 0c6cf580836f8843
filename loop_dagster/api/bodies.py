"""Bodies of requests: read up to a limit while they come in, strictly JSON, every field known by name.

Belongs here: bytes to a checked model, and how a refusal names the field. Does not belong here: what a field means. A
refusal never repeats a value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, Final, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from loop_dagster.api.errors import PayloadTooLarge
from loop_dagster.errors import BadRequest
from loop_dagster.rules.canonical import doubled
from loop_dagster.rules.wording import sentence_of

#: Bytes of a body of settings or of a decision.
SMALL: Final = 1_000_000
#: Bytes of a body that brings one conversation.
MEDIUM: Final = 16_000_000
#: Bytes of a body that brings conversations.
LARGE: Final = 64_000_000
#: Objects and lists inside each other.
MAX_DEPTH: Final = 64
#: Digits of a whole number: what fits into 64 bits.
MAX_DIGITS: Final = 19
#: Where OpenAPI keeps what bodies share; `defined` moves it there.
_REF: Final = "#/components/schemas/{model}"
#: Characters of a name that a refusal repeats.
_LONGEST_NAME: Final = 64
#: Fields that one refusal names.
_NAMED: Final = 5
_T = TypeVar("_T", bound=BaseModel)


class Body(BaseModel):
    """A body whose unknown fields are refused by name; every value has exactly its JSON type."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True, hide_input_in_errors=True)


class Nothing(Body):
    """A body without any field; it may be left out."""


Revision = Annotated[int, Field(ge=1, le=2**31 - 1)]


@dataclass(frozen=True, slots=True)
class Sent:
    """A body as it was sent."""

    raw: bytes

    def __repr__(self) -> str:
        return f"Sent({len(self.raw)} bytes)"


async def read(request: Request, most: int = SMALL) -> Sent:
    """The whole body. Raises PayloadTooLarge as soon as it passes `most` bytes, whatever its header said."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and (len(declared) > MAX_DIGITS or int(declared) > most):
        raise PayloadTooLarge(most)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise PayloadTooLarge(most)
        parts.append(part)
    return Sent(b"".join(parts))


def reader(model: type[_T], *, most: int = SMALL) -> Callable[[Request], Coroutine[Any, Any, tuple[Sent, _T]]]:
    """A dependency that reads a body as `model`; an empty one reads as `{}`."""

    async def body(request: Request) -> tuple[Sent, _T]:
        sent = await read(request, most)
        if sent.raw.strip():
            check_content_type(request.headers.get("content-type"))
        return sent, checked(model, parsed(sent.raw))

    return body


def check_content_type(given: str | None) -> None:
    """Raise BadRequest for a body that says it is something else than JSON."""
    kind = (given or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise BadRequest("The body must be JSON, sent with Content-Type: application/json.", field="Content-Type")


def parsed(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises BadRequest for anything else, or that could not be stored as it is."""
    if not raw.strip():
        return {}
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadRequest("The body is not UTF-8.") from None
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        _too_deep()
    except json.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON (at character {error.pos}).") from None
    _check(value)
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.")
    return value


def checked(model: type[_T], value: dict[str, Any]) -> _T:
    """`value` as `model`. Raises BadRequest naming the first fields that are unknown, missing or wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as refused:
        found = refused.errors(include_url=False, include_input=False)
        field = ".".join(str(part) for part in found[0]["loc"])
        raise BadRequest(" ".join(_sentence(error, model) for error in found[:_NAMED]), field=field) from None


def twice(name: str | None) -> BadRequest:
    """The refusal of a body that has a field twice in one object; a name that is no name of a field is not repeated."""
    known = {"field": name} if name is not None and len(name) <= _LONGEST_NAME else {}
    which = f"the field {name!r}" if known else "a field"
    return BadRequest(
        f"The body has {which} twice in one object, and which of the two was meant cannot be told.", **known
    )


def schema_of(model: type[BaseModel], *, needed: bool = True) -> dict[str, Any]:
    """What OpenAPI says of a body, for a route that reads it through `reader`; its parts are for `defined` to place."""
    schema = model.model_json_schema(by_alias=True, ref_template=_REF)
    return {"requestBody": {"required": needed, "content": {"application/json": {"schema": schema}}}}


def defined(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Move the parts of an operation's body to `schemas`, where their references look. Raises ValueError."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        for name, part in content["schema"].pop("$defs", {}).items():
            if schemas.setdefault(name, part) != part:
                raise ValueError(f"Two bodies have a part called {name}, and OpenAPI has one name for both.")


def _sentence(error: ErrorDetails, model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        where = ".".join(str(part) for part in error["loc"])
        known = ", ".join(field.alias or name for name, field in model.model_fields.items())
        return f"{where} is not a field here{f' (known: {known})' if len(error['loc']) == 1 else ''}."
    return sentence_of(error, "The body")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise twice(doubled(name for name, _value in pairs))
    return found


def _not_finite(_: str) -> NoReturn:
    raise BadRequest("The body holds NaN or Infinity, which JSON has no numbers for.")


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS or not -(2**63) <= int(text) < 2**63:
        raise BadRequest("The body holds a whole number that does not fit into 64 bits.")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise BadRequest("The body holds a number that is larger than any that can be kept.")
    return value


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_once, parse_constant=_not_finite, parse_int=_whole, parse_float=_number
)


def _too_deep() -> NoReturn:
    raise BadRequest(f"The body has more than {MAX_DEPTH} objects and lists inside each other.")


def _check(value: object) -> None:
    """Raise BadRequest for what would be too deep to walk, or has no form in UTF-8."""
    stack: list[tuple[object, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                raise BadRequest("The body holds half a surrogate pair, which UTF-8 has no form for.") from None
            if "\0" in item:
                raise BadRequest("The body holds the character U+0000, which not every database can keep.")
        elif isinstance(item, dict | list):
            if depth >= MAX_DEPTH:
                _too_deep()
            inner = [*item, *item.values()] if isinstance(item, dict) else item
            stack.extend((one, depth + 1) for one in inner)
