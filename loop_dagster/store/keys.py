"""Keys of the API in the registry: made, found by their hash, revoked.

Belongs here: what a key may do (scopes) and where (workspaces), and when it was last used, to the minute. Does not
belong here: reading a key from a request and what a route asks for (api/). A key is shown once, when it is made; only
its sha256 is kept, which suffices for 256 random bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, get_args

import sqlalchemy as sa
from uuid_utils import uuid7

from loop_dagster.errors import BadRequest, NotFound, RegistryUnavailable
from loop_dagster.store.registry import Registry
from loop_dagster.store.schema import api_keys

Scope = Literal["loop:read", "loop:write", "serverless", "deployments:read"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
#: What keys begin with, so that a person and a redactor know one when they see it.
PREFIX: Final = "loop_"
MAX_NAME: Final = 80
#: Characters of a key that are kept readable.
_SHOWN: Final = 11
#: The time of the last use is written once in this long.
_NOTED_EVERY: Final = timedelta(minutes=1)
_WORKSPACE: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
#: Made once: every call asks it.
_BY_HASH: Final = sa.select(api_keys).where(
    api_keys.c.key_hash == sa.bindparam("hashed"), api_keys.c.revoked_at.is_(None)
)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as it was read; never the key itself. `prefix` is its beginning, `last_used_at` is to the minute."""

    key_id: str
    name: str
    prefix: str
    scopes: tuple[Scope, ...]
    workspaces: tuple[str, ...]
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made, with its text, which nothing can show again."""

    text: str
    key: ApiKey

    def __repr__(self) -> str:
        return f"NewKey({self.key.key_id})"


class Keys:
    """The keys of one registry. Those made in a workspace are listed and revoked there; any may be looked up."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._noted: dict[str, datetime] = {}
        self._lock = threading.Lock()

    def create(
        self,
        *,
        name: str = "",
        scopes: Sequence[str] = SCOPES,
        workspaces: Sequence[str] = (),
        now: datetime | None = None,
    ) -> NewKey:
        """Make a key; without `workspaces` it is bound to the registry's own.

        Raises BadRequest for a scope that is not there, a workspace that none can be called, or a long name.
        """
        unknown = [scope for scope in scopes if scope not in SCOPES]
        if unknown or not scopes:
            raise BadRequest(
                f"A key's scopes are some of {', '.join(SCOPES)}; got {unknown[0] if unknown else 'none'!r}."
            )
        bound = tuple(dict.fromkeys(workspaces)) or (self.registry.workspace,)
        for workspace in bound:
            if not _WORKSPACE.fullmatch(workspace):
                raise BadRequest(
                    "A workspace is called by 1 to 63 lower-case letters, digits, '_' and '-', and begins with a "
                    f"letter or digit; got {workspace!r}."
                )
        if len(name) > MAX_NAME or not name.isprintable():
            raise BadRequest(f"A key's name has at most {MAX_NAME} printable characters.")
        text = PREFIX + secrets.token_urlsafe(32)
        row = {
            "workspace": self.registry.workspace,
            "key_id": str(uuid7()),
            "key_hash": _hash(text),
            "prefix": text[:_SHOWN],
            "name": name,
            "scopes": [scope for scope in SCOPES if scope in scopes],
            "workspaces": list(bound),
            "created_at": now or datetime.now(UTC),
        }
        with self.registry.write() as connection:
            connection.execute(sa.insert(api_keys).values(**row))
            return NewKey(text, self._get(connection, str(row["key_id"])))

    def list(self) -> tuple[ApiKey, ...]:
        """Every key made in this workspace, oldest first, revoked ones too."""
        query = sa.select(api_keys).where(self._mine()).order_by(api_keys.c.created_at, api_keys.c.key_id)
        with self.registry.read() as connection:
            return tuple(_key(row) for row in connection.execute(query).mappings())

    def revoke(self, key_id: str, *, now: datetime | None = None) -> ApiKey:
        """Refuse the key from now on; revoking it again changes nothing. Raises NotFound."""
        here = sa.and_(self._mine(), api_keys.c.key_id == key_id)
        with self.registry.write() as connection:
            self._get(connection, key_id)
            connection.execute(
                sa.update(api_keys)
                .where(here, api_keys.c.revoked_at.is_(None))
                .values(revoked_at=now or datetime.now(UTC))
            )
            return self._get(connection, key_id)

    def find(self, text: str) -> ApiKey | None:
        """The key that `text` is, whichever workspace made it; None when there is none or it was revoked.

        One indexed read; `note` writes that the key was used, for which whoever shows it should not have to wait.
        """
        with self.registry.read() as connection:
            row = connection.execute(_BY_HASH, {"hashed": _hash(text)}).mappings().one_or_none()
        return None if row is None else _key(row)

    def note(self, key: ApiKey, *, now: datetime | None = None) -> None:
        """Write that a key was used, unless this process did so within the last minute."""
        now = now or datetime.now(UTC)
        with self._lock:
            if not self.is_worth_noting(key, now=now):
                return
            self._noted[key.key_id] = now
        # Whoever may only read, or meets a full disk, is still let in to read.
        with contextlib.suppress(RegistryUnavailable), self.registry.write() as connection:
            used = sa.update(api_keys).where(api_keys.c.key_id == key.key_id)  # of whichever workspace made it
            connection.execute(used.values(last_used_at=now))

    def is_worth_noting(self, key: ApiKey, *, now: datetime | None = None) -> bool:
        """Whether `note` would write."""
        last = max((at for at in (self._noted.get(key.key_id), key.last_used_at) if at), default=None)
        return last is None or (now or datetime.now(UTC)) - last >= _NOTED_EVERY

    def _mine(self) -> sa.ColumnElement[bool]:
        return api_keys.c.workspace == self.registry.workspace

    def _get(self, connection: sa.Connection, key_id: str) -> ApiKey:
        query = sa.select(api_keys).where(self._mine(), api_keys.c.key_id == key_id)
        row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise NotFound("key", key_id)
        return _key(row)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _key(row: sa.RowMapping) -> ApiKey:
    return ApiKey(
        key_id=row["key_id"],
        name=row["name"],
        prefix=row["prefix"],
        scopes=tuple(row["scopes"]),
        workspaces=tuple(row["workspaces"]),
        created_at=row["created_at"],
        last_used_at=row["last_used_at"],
        revoked_at=row["revoked_at"],
    )
