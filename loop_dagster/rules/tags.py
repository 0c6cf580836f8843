"""Tags, parents and attributes of a sample: what may be one, and the tag that a pipeline's name makes.

Belongs here: the rules of rules.md, Samples, about the words themselves and their number. Does not belong here: which
samples a tag selects (selection.py), storing them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from anyascii import anyascii

from loop_dagster.errors import BadRequest
from loop_dagster.rules.quoting import shown

MAX_LENGTH: Final = 63
#: Tags and attributes that one sample carries at most.
MAX_ON_SAMPLE: Final = 32
#: Characters of an attribute's value.
MAX_VALUE: Final = 500

#: What a sample carries one of: a word, and whether it is the key of an attribute. A tag and an attribute of one name
#: are two things.
Name: TypeAlias = tuple[str, bool]

_TAG: Final = re.compile(r"[a-z0-9._-]{1,63}")
_OWN: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_NEEDED: Final = f"1 to {MAX_LENGTH} lower-case letters, digits, '.', '_' or '-'"


class BadTag(BadRequest):
    """A word that cannot be a tag or an attribute; refused by name."""

    code = "BAD_TAG"

    def __init__(self, what: str, found: object, needed: str = _NEEDED) -> None:
        super().__init__(
            f"{what} {shown(found, 80)} cannot be used: needed {needed}. Nothing was stored; send another word.",
            what=what,
        )


class TooManyTags(BadRequest):
    """More tags and attributes than one sample can carry."""

    code = "TOO_MANY_TAGS"

    def __init__(self, found: int) -> None:
        super().__init__(
            f"A sample carries at most {MAX_ON_SAMPLE} tags and attributes, found {found}. Nothing was stored; "
            "send fewer.",
            found=found,
        )


@dataclass(frozen=True, slots=True)
class Labels:
    """Clean tags in the order given, without repetition, and attributes by key."""

    tags: tuple[str, ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.tags) + len(self.attributes)

    @property
    def names(self) -> frozenset[Name]:
        """What these put on a sample."""
        return frozenset([*((word, False) for word in self.tags), *((key, True) for key, _value in self.attributes)])


def tag(value: object, *, what: str = "Tag") -> str:
    """A tag, trimmed and lower-cased. Raises BadTag."""
    if not isinstance(value, str):
        raise BadTag(what, value)
    word = value.strip().lower()
    if not _TAG.fullmatch(word):
        raise BadTag(what, value)
    return word


def own_tag(value: object) -> str:
    """A pipeline's own tag: a tag that begins with a letter or digit. Raises BadTag."""
    word = tag(value, what="A pipeline's own tag")
    if not _OWN.fullmatch(word):
        raise BadTag("A pipeline's own tag", value, f"{_NEEDED}, the first a letter or digit")
    return word


def parent(value: object) -> str | None:
    """A parent as it came: null keeps the present one (None), `""` takes it out (""), else a tag. Raises BadTag."""
    if value is None:
        return None
    if isinstance(value, str) and not value.strip():
        return ""
    return tag(value, what="Parent")


def labels(
    tags: Iterable[object] | None = None,
    attributes: Mapping[str, object] | None = None,
    *,
    already: Iterable[Name] = (),
) -> Labels:
    """Tags and attributes as they are stored. Raises BadTag or TooManyTags, naming the first that is wrong.

    `already` are the names that the sample carries: they count among the 32, once.
    """
    if isinstance(tags, str):
        raise BadTag("`labels`", tags, "a list of tags")
    words = tuple(dict.fromkeys(tag(value) for value in tags or ()))
    pairs: dict[str, str] = {}
    for name, value in (attributes or {}).items():
        if not isinstance(value, str) or not value.strip() or len(value.strip()) > MAX_VALUE:
            raise BadTag("The value of attribute", name, f"a text of 1 to {MAX_VALUE} characters as its value")
        pairs[tag(name, what="Attribute")] = value.strip()
    clean = Labels(words, tuple(pairs.items()))
    count = len({*already, *clean.names})
    if count > MAX_ON_SAMPLE:
        raise TooManyTags(count)
    return clean


def slug(name: str) -> str:
    """The tag of a pipeline's name: lower case, everything else than letters and digits as single dashes.

    Other scripts are written in Latin letters (`Réponses` → `reponses`, `Größe` → `grosse`). A name without any letter
    or digit gives `pipeline`.
    """
    return re.sub(r"[^a-z0-9]+", "-", anyascii(name).lower()).strip("-")[:MAX_LENGTH].strip("-") or "pipeline"
