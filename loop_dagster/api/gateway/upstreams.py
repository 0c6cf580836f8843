"""Which server answers for a model, and which headers go to it and come back.

Belongs here: names and patterns of the settings, headers that one connection owns, keys that must not travel. Does not
belong here: sending anything.
"""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from loop_dagster.settings import Settings, Upstream

#: In which shape a call speaks: OpenAI's chat completions or Anthropic's messages.
Shape = Literal["openai", "anthropic"]
PATHS: Final[Mapping[Shape, str]] = {"openai": "/chat/completions", "anthropic": "/messages"}
#: What names of live versions begin with.
LIVE: Final = "loop-"

Headers = list[tuple[bytes, bytes]]

#: Headers of one connection and of none beyond it (RFC 9110, 7.6.1).
_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
#: What a caller says to this server alone. Its key is among them: an upstream never sees it.
_OURS: Final = frozenset(
    {
        b"accept-encoding",
        b"api-key",
        b"authorization",
        b"content-length",
        b"cookie",
        b"expect",
        b"host",
        b"x-api-key",
        b"x-org-id",
        b"x-workspace-id",
    }
)
#: What an upstream says of itself and not of its answer.
_THEIRS: Final = frozenset({b"alt-svc", b"date", b"set-cookie", b"strict-transport-security"})
_LOOP: Final = b"x-loop-"


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answers for a model. `name` is how messages call it; the address and the key are not shown."""

    base: str
    key: str | None
    kind: Literal["openai", "anthropic", "live"]
    name: str

    def __repr__(self) -> str:
        return f"Target({self.name!r})"

    @property
    def server(self) -> tuple[str, str | None, str]:
        """What two names of one server have in common."""
        return self.base, self.key, self.kind

    @property
    def proxy(self) -> str | None:
        """The proxy that the environment names for it; none leads to this machine or to what NO_PROXY lists."""
        parts = urlsplit(self.base)
        host = parts.hostname or ""
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host).is_loopback:
                return None
        if host == "localhost" or proxy_bypass(host):
            return None
        return getproxies_environment().get(parts.scheme)

    def url(self, path: str, query: str = "") -> str:
        return f"{self.base}{path}{'?' if query else ''}{query}"

    def authorization(self, shape: Shape) -> Headers:
        """The header that shows the upstream's own key."""
        if self.key is None:
            return []
        if self.kind == "anthropic" and shape == "anthropic":
            return [(b"x-api-key", self.key.encode())]
        return [(b"authorization", b"Bearer " + self.key.encode())]


class Upstreams:
    """The servers that settings name."""

    def __init__(self, settings: Settings) -> None:
        self._named = {name: _target(name, one) for name, one in settings.upstreams.items()}
        host = settings.serve_host
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # where it listens to all
        where = f"[{shown}]" if ":" in shown else shown
        self.live: Final = Target(f"http://{where}:{settings.serve_port}/v1", None, "live", "the serving engine")

    def of(self, model: str) -> Target | None:
        """The server for a model: by its exact name, else by the first pattern that fits; None when there is none."""
        found = self._named.get(model)
        if found is not None:
            return found
        return next((one for name, one in self._named.items() if fnmatch.fnmatchcase(model, name)), None)

    def names(self) -> list[str]:
        """Exact names of models in the settings."""
        return [name for name in self._named if not any(sign in name for sign in "*?[")]

    def servers(self) -> list[Target]:
        """Every server once, in the order of the settings."""
        found: dict[tuple[str, str | None, str], Target] = {}
        for one in self._named.values():
            found.setdefault(one.server, one)
        return list(found.values())


def _target(name: str, upstream: Upstream) -> Target:
    key = upstream.api_key.get_secret_value() if upstream.api_key is not None else None
    return Target(upstream.url, key or None, upstream.kind, f"the upstream of {name}")


def to_upstream(headers: Iterable[tuple[bytes, bytes]], target: Target, shape: Shape) -> Headers:
    """A caller's headers as the upstream gets them: with its own key in place of the caller's."""
    given = list(headers)
    dropped = _HOP | _OURS | _named_by_connection(given)
    kept = [(name, value) for name, value in given if name not in dropped and not name.startswith(_LOOP)]
    # Of the encodings that a caller may take, the one that can be read here too: an answer is passed on as it comes.
    zipped = any(name == b"accept-encoding" and b"gzip" in value.lower() for name, value in given)
    return [*kept, (b"accept-encoding", b"gzip" if zipped else b"identity"), *target.authorization(shape)]


def to_caller(headers: Iterable[tuple[bytes, bytes]], *, live: bool) -> Headers:
    """An upstream's headers as the caller gets them."""
    given = [(name.lower(), value) for name, value in headers]
    dropped = _HOP | _THEIRS | _named_by_connection(given)
    return [(name, value) for name, value in given if name not in dropped and (live or not name.startswith(_LOOP))]


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    named = b",".join(value for name, value in headers if name == b"connection")
    return frozenset(word.strip().lower() for word in named.split(b",")) - {b"content-length", b"content-type"}
