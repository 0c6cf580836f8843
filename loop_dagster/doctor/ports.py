"""The ports of Dagster's UI, of serving and of the API: free, or taken by this installation's own process.

Belongs here: who listens where. Does not belong here: whether what listens answers well.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from loop_dagster.doctor.findings import Finding, fine, mistake
from loop_dagster.doctor.installation import Installation, Kind, describe

#: How far a free port is looked for beside the wanted one.
_NEAR: Final = 50


def ports(installation: Installation) -> Iterator[Finding]:
    settings = installation.known
    wanted = (
        _Wanted("Dagster's UI", "ui", "127.0.0.1", settings.webserver_port, "LOOP_WEBSERVER_PORT"),
        _Wanted("serving", "serving", settings.serve_host, settings.serve_port, "LOOP_SERVE_PORT"),
        _Wanted("the API", "api", settings.api_host, settings.api_port, "LOOP_API_PORT"),
    )
    for one, other in itertools.combinations(wanted, 2):
        if one.port == other.port:
            yield mistake(
                "port_twice",
                "ports",
                where=f"{one.setting} and {other.setting}",
                found=f"both are {one.port}",
                mend=f"`export {other.setting}={_free_after(other, wanted)}`",
            )
    for one in wanted:
        yield _port(installation, one, wanted)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An address that one of our servers needs, and the setting that moves it."""

    name: str
    kind: Kind
    host: str
    port: int
    setting: str


def _port(installation: Installation, wanted: _Wanted, all_wanted: Sequence[_Wanted]) -> Finding:
    host, port, setting = wanted.host, wanted.port, wanted.setting
    what, where = f"port of {wanted.name}", f"{host}:{port}"
    code = _bound(host, port)
    if code is None:
        return fine("port", what, where=where, found="free")
    if code in (errno.EACCES, errno.EPERM):
        return mistake(
            "port_forbidden",
            what,
            where=where,
            found="this user may not listen on so low a port",
            mend=f"`export {setting}={port + 8000}`",
        )
    if code == errno.EADDRNOTAVAIL or code in _UNKNOWN_HOST:
        return mistake(
            "host_not_here",
            what,
            where=where,
            found=f"{host} is no address of this machine",
            mend=f"`export {setting.replace('PORT', 'HOST')}=127.0.0.1` for this machine alone, or `0.0.0.0` for all "
            "of its addresses.",
        )
    pid = _listener(port)
    if pid is not None and _is_ours(installation, pid, wanted.kind):
        return fine(
            "port", what, where=where, found=f"this installation's own {wanted.name} listens there (process {pid})"
        )
    home = _home_of(pid)
    who = describe(pid) if pid is not None else "a program that this user may not see"
    other = f" of the installation {home}" if home else ""
    end = f"end it (`kill {pid}`)" if pid is not None else "end that program"
    choose = f"`export {setting}={_free_after(wanted, all_wanted)}`"
    return mistake(
        "port_taken",
        what,
        where=where,
        found=f"{who}{other} listens there",
        mend=f"Choose another port: {choose}; or {end} if it is not needed.",
    )


#: What getaddrinfo says of a name that is none.
_UNKNOWN_HOST: Final = frozenset({socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_NODATA})


def _bound(host: str, port: int) -> int | None:
    """Error number of listening there for a moment; None when it is free."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.errno
    return None


def _free_after(wanted: _Wanted, all_wanted: Sequence[_Wanted]) -> int | str:
    """The next port that is free and that no other of our servers wants, to choose instead."""
    ours = {one.port for one in all_wanted}
    near = (port for port in range(wanted.port + 1, wanted.port + _NEAR) if port not in ours)
    return next((port for port in near if _bound(wanted.host, port) is None), "<port>")


def _listener(port: int) -> int | None:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port:
                return one.pid
    return None


def _is_ours(installation: Installation, pid: int, kind: Kind) -> bool:
    if kind == "serving":
        with contextlib.suppress(OSError, ValueError, KeyError):
            note = json.loads((installation.root / "run" / "serving.json").read_text("utf-8"))
            if int(note["pid"]) == pid:
                return True
    mine = {one.pid for one in installation.running if one.kind == kind}
    return pid in mine or _parent(pid) in mine  # a worker of the API listens in its parent's place


def _parent(pid: int) -> int | None:
    import psutil

    try:
        found: int = psutil.Process(pid).ppid()
    except psutil.Error:
        return None
    return found


def _home_of(pid: int | None) -> str | None:
    """LOOP_HOME of the installation that a listening process belongs to."""
    import psutil

    if pid is None:
        return None
    try:
        found: str | None = psutil.Process(pid).environ().get("LOOP_HOME")
    except (psutil.Error, OSError):
        return None
    return found
