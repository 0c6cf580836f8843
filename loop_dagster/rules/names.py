"""Names of pipelines and datasets: how long one may be, and which two are the same.

Belongs here: what a person may type. Does not belong here: the tag that a name makes (tags.py), and who has a name
already (store/pipelines.py, store/datasets.py).
"""

from __future__ import annotations

import unicodedata
from typing import Final

from loop_dagster.errors import BadRequest

#: Characters of a name, and of its key, which compatibility forms can make longer.
MAX_NAME: Final = 80
MAX_KEY: Final = 200


def checked_name(name: str, *, whose: str) -> str:
    """The name with single spaces. Raises BadRequest where it is empty or too long; `whose` begins the sentence."""
    clean = " ".join(name.split())
    if not 1 <= len(clean) <= MAX_NAME:
        raise BadRequest(f"{whose} name has 1 to {MAX_NAME} characters, got {len(clean)}.", field="name")
    return clean


def name_key(name: str) -> str:
    """A name as it is compared: compatibility forms, case and runs of white space folded."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())[:MAX_KEY]
