"""What the doctor says: one finding per thing that was looked at.

Belongs here: the shape of a finding and its levels. Does not belong here: any look.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

#: `mistake`: the installation does not work as it should, exit status 1. `warning`: it works, and something is likely
#: to be other than meant. `note`: good to know, with a next step. `fine`: looked at, nothing to say.
Level = Literal["mistake", "warning", "note", "fine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    `code` is stable, for scripts; `where` the file, setting, table or process; `mend` says what to do, with a command
    or an edit, and is empty for `fine` alone. No part may hold a secret or a sample's text.
    """

    code: str
    level: Level
    what: str
    where: str
    found: str
    mend: str

    def __post_init__(self) -> None:
        if (self.level == "fine") != (self.mend == ""):
            raise ValueError(f"{self.code}: a finding says how to mend it, unless it is fine")

    @property
    def ok(self) -> bool:
        """False for a mistake alone."""
        return self.level != "mistake"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def fine(code: str, what: str, *, found: str, where: str = "") -> Finding:
    return Finding(code=code, level="fine", what=what, where=where, found=found, mend="")


def note(code: str, what: str, *, found: str, mend: str, where: str = "") -> Finding:
    return Finding(code=code, level="note", what=what, where=where, found=found, mend=mend)


def warning(code: str, what: str, *, found: str, mend: str, where: str = "") -> Finding:
    return Finding(code=code, level="warning", what=what, where=where, found=found, mend=mend)


def mistake(code: str, what: str, *, found: str, mend: str, where: str = "") -> Finding:
    return Finding(code=code, level="mistake", what=what, where=where, found=found, mend=mend)


def told(code: str, what: str, message: str, *, where: str = "") -> Finding:
    """A mistake from an error's message, whose last sentence is the next step by the rule of errors/__init__.py."""
    found, stop, mend = message.rstrip().rpartition(". ")
    if not stop:
        return mistake(code, what, where=where, found=message, mend="See to that, then run `loop doctor` again.")
    return mistake(code, what, where=where, found=found, mend=mend)
