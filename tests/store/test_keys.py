"""Keys of the API: shown once, kept as a hash, found from any workspace, refused when revoked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from loop_dagster.errors import BadRequest, NotFound
from loop_dagster.rules.redaction import redact
from loop_dagster.store.keys import SCOPES, Keys
from loop_dagster.store.registry import Registry
from loop_dagster.store.schema import api_keys

NOW = datetime(2026, 12, 1, tzinfo=UTC)


def test_a_key_is_kept_as_a_hash_alone(registry: Registry) -> None:
    made = Keys(registry).create(name="mine", now=NOW)
    assert made.text not in repr(made)
    assert made.key.prefix == made.text[:11]
    with registry.read() as connection:
        stored = str(connection.execute(sa.select(api_keys)).mappings().one())
    assert made.text not in stored
    assert Keys(registry).find(made.text) == made.key
    assert Keys(registry).find(made.text + "x") is None
    assert made.key.scopes == SCOPES
    assert made.key.workspaces == ("default",)


def test_any_workspace_finds_it_and_only_its_own_lists_it(registry: Registry) -> None:
    elsewhere = Registry(registry.url, "elsewhere")
    made = Keys(registry).create(workspaces=["default", "third"], scopes=["loop:read"])
    found = Keys(elsewhere).find(made.text)
    assert found is not None
    assert (found.workspaces, found.scopes) == (("default", "third"), ("loop:read",))
    assert Keys(elsewhere).list() == ()
    with pytest.raises(NotFound):
        Keys(elsewhere).revoke(made.key.key_id)
    elsewhere.dispose()


def test_a_revoked_key_is_found_no_more(registry: Registry) -> None:
    keys = Keys(registry)
    made = keys.create()
    first = keys.revoke(made.key.key_id, now=NOW)
    assert keys.revoke(made.key.key_id, now=NOW + timedelta(days=1)) == first
    assert keys.find(made.text) is None
    assert [key.revoked_at for key in keys.list()] == [NOW]


def test_its_use_is_written_once_a_minute(registry: Registry) -> None:
    keys = Keys(registry)
    made = keys.create(now=NOW)
    used = []
    for second in (0, 20, 59, 60, 61):
        found = keys.find(made.text)
        assert found is not None
        keys.note(found, now=NOW + timedelta(seconds=second))
        used.append(keys.list()[0].last_used_at)
    assert used == [NOW, NOW, NOW, NOW + timedelta(seconds=60), NOW + timedelta(seconds=60)]


@pytest.mark.parametrize(
    ("given", "said"),
    [({"scopes": ["loop:all"]}, "loop:all"), ({"scopes": []}, "none"), ({"workspaces": ["No"]}, "'No'"),
     ({"name": "n" * 81}, "80"), ({"name": "a\nb"}, "printable")],
)  # fmt: skip
def test_what_no_key_can_be_is_refused(sqlite_registry: Registry, given: dict[str, object], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        Keys(sqlite_registry).create(**given)  # type: ignore[arg-type]


def test_every_key_that_is_made_is_one_that_redaction_knows(registry: Registry) -> None:
    keys = Keys(registry)
    for _ in range(20):
        text = keys.create().text
        assert redact(f"My key is {text}, why is it refused?")[0] == "My key is [redacted:api_key], why is it refused?"
