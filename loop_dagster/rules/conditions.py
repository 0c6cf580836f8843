"""Conditions on samples: what a dataset selects by, and what narrows a pipeline.

Belongs here: what a person may write, its ranges, how an edit changes it, and its JSON. Does not belong here: which
samples meet them (matching.py), a dataset's name and revision (store/datasets.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from loop_dagster.errors import BadRequest
from loop_dagster.rules.tags import MAX_ON_SAMPLE
from loop_dagster.rules.tags import tag as clean_tag
from loop_dagster.rules.wording import sentence_of

FeedbackWord = Literal["good", "corrected", "bad", "unreviewed"]
#: In the order in which they are kept, whatever order they came in.
FEEDBACK_WORDS: Final[tuple[FeedbackWord, ...]] = ("good", "corrected", "bad", "unreviewed")
Origin = Literal["captured", "imported"]
Match = Literal["any", "all"]


class Part(BaseModel):
    """A part of what is set by a person: unknown fields are refused, every value has exactly its JSON type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)


def _utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("a time needs its zone, for example 2026-01-31T00:00:00Z")
    if not 1970 <= value.year < 2200:
        raise ValueError("a time must lie between 1970 and 2200")
    return value.astimezone(UTC)


Moment = Annotated[datetime, Field(strict=False), AfterValidator(_utc)]


class Narrowing(Part):
    """What samples have to be; all of it has to hold. Empty feedback and None keep everything; both times count.

    `feedback` reads the deciding verdict of a person: `good`, `corrected` (a correction or a gold answer), `bad`,
    `unreviewed` (no person said anything, whether or not the judge scored it). `model` is the one that answered, to the
    letter. `from` and `to` are about when a sample was recorded.
    """

    feedback: Annotated[tuple[FeedbackWord, ...], Field(strict=False)] = ()
    origin: Origin | None = None
    model: Annotated[str, Field(min_length=1)] | None = None
    from_: Moment | None = Field(default=None, alias="from")
    to: Moment | None = None

    @field_validator("feedback")
    @classmethod
    def _in_one_order(cls, words: tuple[FeedbackWord, ...]) -> tuple[FeedbackWord, ...]:
        return tuple(word for word in FEEDBACK_WORDS if word in words)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.from_ and self.to and self.from_ > self.to:
            raise ValueError(f"from {self.from_.isoformat()} is after to {self.to.isoformat()}")
        return self

    def to_json(self) -> dict[str, Any]:
        """A JSON object, times as ISO text."""
        return self.model_dump(mode="json", by_alias=True)


class DatasetConditions(Narrowing):
    """Everything that a dataset selects by. Without `tags` it does not ask for any.

    `match`: a sample carries `any` of the tags, or `all` of them; a child of a tag counts as that tag. Without tags it
    is `any`.
    """

    tags: Annotated[tuple[str, ...], Field(strict=False, max_length=MAX_ON_SAMPLE)] = ()
    match: Match = "any"

    @field_validator("tags")
    @classmethod
    def _tags_once(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(clean_tag(tag, what="tags") for tag in tags))

    @model_validator(mode="before")
    @classmethod
    def _any_without_tags(cls, given: Any) -> Any:
        without = isinstance(given, Mapping) and not given.get("tags") and given.get("match") == "all"
        return {**given, "match": "any"} if without else given

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DatasetConditions:
        """Conditions from what `to_json` gave, or from a body that names only what it sets. Raises BadRequest."""
        return cls().merged(data)

    def merged(self, edit: Mapping[str, Any]) -> DatasetConditions:
        """These conditions after an edit, where absent keeps, null takes a condition out and a value replaces it.

        Raises BadRequest naming every field that is unknown or wrong; nothing changes then.
        """
        changed = {**self.to_json(), **edit}
        given = {name: value for name, value in changed.items() if value is not None or name not in self._fields()}
        try:
            return DatasetConditions.model_validate(given)
        except ValidationError as refused:
            found = refused.errors(include_url=False, include_input=False)
            field = str(found[0]["loc"][0]) if found[0]["loc"] else None
            sentences = " ".join(self._sentence(error) for error in found)
            raise BadRequest(f"{sentences} Nothing was saved.", **({"field": field} if field else {})) from None

    @classmethod
    def _fields(cls) -> list[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def _sentence(cls, error: ErrorDetails) -> str:
        if error["type"] == "extra_forbidden":
            return f"{'.'.join(map(str, error['loc']))} is no condition (known: {', '.join(cls._fields())})."
        return sentence_of(error, "The conditions")
