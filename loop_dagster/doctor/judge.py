"""The judge: reachable, with a key that it takes and a model that it knows, answering in a form that can be read.

Belongs here: one tiny real call. Does not belong here: the calls of a comparison (models/judge_openai.py). Neither the
key nor an answer of the server is shown.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Final

from loop_dagster.doctor.findings import Finding, fine, mistake, note, told, warning
from loop_dagster.doctor.installation import Installation
from loop_dagster.errors import (
    BadRequest,
    JudgeRefused,
    JudgeRejected,
    JudgeUnavailable,
    JudgeUnreadable,
    LoopError,
)
from loop_dagster.models.judge import Case, open_judge
from loop_dagster.models.judge_openai import OpenAIJudge
from loop_dagster.settings import Settings

_WHAT: Final = "judge"
#: One short answer; a judge that reasons first may take longer, which is no mistake.
PATIENCE_S: Final = 10.0
_CASE: Final = Case(
    sample_id="doctor",
    messages=[{"role": "user", "content": "What is two and two?"}],
    right_answer={"role": "assistant", "content": "Four."},
)


def judge(installation: Installation) -> Iterator[Finding]:
    """`reference` needs nothing; `openai` is asked once; another one only has to open."""
    settings = installation.known
    if settings.judge == "reference":
        yield fine("judge", _WHAT, where="LOOP_JUDGE", found="reference: it compares with the right answer, no server")
        return
    malformed = _key_problem(settings)
    if malformed is not None:
        yield malformed
        return
    try:
        if settings.judge != "openai":
            yield fine("judge", _WHAT, where="LOOP_JUDGE", found=f"{open_judge(settings).name} opens")
            return
        OpenAIJudge.from_settings(settings).close()
    except BadRequest as error:
        yield told("judge_setting", _WHAT, error.message, where="LOOP_JUDGE")
        return
    yield from _itself(installation)
    if installation.offline:
        yield note(
            "judge_not_asked",
            _WHAT,
            where="LOOP_JUDGE_URL",
            found="set, and not asked",
            mend="`loop doctor` without --offline asks it once.",
        )
        return
    yield ask(settings)


def _itself(installation: Installation) -> Iterator[Finding]:
    """A live version of this installation as the judge of those that follow it (docs/judge.md: never)."""
    settings = installation.known
    if not installation.readable or not _is_ours(settings):
        return
    judging = [one for one in installation.store.pipelines.list() if one.live_name == settings.judge_model]
    for pipeline in judging:
        yield warning(
            "judge_is_live_version",
            _WHAT,
            where="LOOP_JUDGE_URL, LOOP_JUDGE_MODEL",
            found=f"{_server(settings)} is this installation, and {settings.judge_model} is what {pipeline.tag} has "
            "live: it would rate its own successors",
            mend="`export LOOP_JUDGE_MODEL=` and LOOP_JUDGE_URL with a model that the loop does not train, or "
            "`export LOOP_JUDGE=reference`.",
        )


def _is_ours(settings: Settings) -> bool:
    """Whether the judge's address is where serving or the API of this installation listens."""
    import httpx

    address = httpx.URL(str(settings.judge_url))
    port = address.port or (443 if address.scheme == "https" else 80)
    host = address.host.lower().rstrip(".")
    listening = ((settings.serve_host, settings.serve_port), (settings.api_host, settings.api_port))
    return any(port == ours and (host == at.lower() or _is_this_machine(host)) for at, ours in listening)


def _is_this_machine(host: str) -> bool:
    """Whether a name or an address is one of this machine's; no server is asked for a name."""
    import psutil

    with contextlib.suppress(ValueError):
        given = ipaddress.ip_address(host.strip("[]"))
        if given.is_loopback or given.is_unspecified:
            return True
    mine = {one.address.partition("%")[0].lower() for found in psutil.net_if_addrs().values() for one in found}
    names = {"localhost", "ip6-localhost", socket.gethostname().lower()}
    return host in mine | names or host.endswith(".localhost")


def ask(settings: Settings) -> Finding:
    """One preference between two answers of a word each."""
    assert settings.judge_url and settings.judge_model
    key = settings.judge_api_key.get_secret_value() if settings.judge_api_key is not None else None
    found = OpenAIJudge(url=settings.judge_url, model=settings.judge_model, key=key, timeout_s=PATIENCE_S, tries=1)
    with closing(found):
        try:
            found.prefer(_CASE, {"role": "assistant", "content": "Four."}, {"role": "assistant", "content": "Seven."})
        except JudgeRefused as error:
            return _refused(settings, key, error)
        except JudgeUnavailable as error:
            return _unavailable(settings, error)
        except JudgeRejected as error:
            return told("judge_rejected", _WHAT, error.message, where="LOOP_JUDGE_URL")
        except JudgeUnreadable as error:
            return warning(
                "judge_unreadable",
                _WHAT,
                where="LOOP_JUDGE_MODEL",
                found=error.message.partition(". ")[0],
                mend="Name a model that keeps to a form of JSON; samples whose ratings cannot be read count as failed.",
            )
        except LoopError as error:
            return told(error.code.lower(), _WHAT, error.message)
    return fine("judge", _WHAT, where=_server(settings), found=f"{settings.judge_model} answered")


def _key_problem(settings: Settings) -> Finding | None:
    """A key that no server could take, told by its form."""
    if settings.judge_api_key is None:
        return None
    key = settings.judge_api_key.get_secret_value()
    problem = None
    if not key.strip():
        problem = "it is empty"
    elif key != key.strip() or any(sign.isspace() for sign in key):
        problem = "it holds white space or a line break"
    elif key[0] in "\"'" or key[-1] in "\"'":
        problem = "it stands in quotation marks that belong to it"
    elif not key.isascii():
        problem = "it holds a sign that no key has"
    if problem is None:
        return None
    return mistake(
        "judge_key_form",
        _WHAT,
        where="LOOP_JUDGE_API_KEY",
        found=problem,
        mend="`export LOOP_JUDGE_API_KEY=<the key alone>`, or `unset LOOP_JUDGE_API_KEY` for a server without keys.",
    )


def _refused(settings: Settings, key: str | None, error: JudgeRefused) -> Finding:
    reason, status = error.details["reason"], error.details["status"]
    server = _server(settings)
    if reason == "key":
        found = f"{server} answered {status}: " + ("it refused the key" if key else "it wants a key, and none is set")
        return mistake(
            "judge_key_refused",
            _WHAT,
            where="LOOP_JUDGE_API_KEY",
            found=found,
            mend=f"`export LOOP_JUDGE_API_KEY=<a key of {server} that may use {settings.judge_model}>`",
        )
    if reason == "credit":
        return mistake(
            "judge_no_credit",
            _WHAT,
            where="LOOP_JUDGE_API_KEY",
            found=f"{server} answered {status}: no credit is left for the key",
            mend="Add credit there, or use the key of another account.",
        )
    known = _models_of(settings, key)
    if known:
        near = difflib.get_close_matches(str(settings.judge_model), known, n=1, cutoff=0.3)
        return mistake(
            "judge_model_unknown",
            _WHAT,
            where="LOOP_JUDGE_MODEL",
            found=f"{server} does not know {settings.judge_model}; it has {', '.join(sorted(known)[:5])}",
            mend=f"`export LOOP_JUDGE_MODEL={(near or sorted(known))[0]}`",
        )
    return mistake(
        "judge_model_unknown",
        _WHAT,
        where="LOOP_JUDGE_MODEL, LOOP_JUDGE_URL",
        found=f"{server} answered {status}: it knows neither the model {settings.judge_model} nor, maybe, the address",
        mend="Check the model's name, and that LOOP_JUDGE_URL ends as the server's manual says, mostly in /v1.",
    )


def _unavailable(settings: Settings, error: JudgeUnavailable) -> Finding:
    last = error.message.partition("(last: ")[2].partition(")")[0]
    if "Timeout" in last and "Connect" not in last:
        return warning(
            "judge_slow",
            _WHAT,
            where=_server(settings),
            found=f"no answer to a short question within {PATIENCE_S:.0f} s",
            mend="A comparison waits 120 s for each call. If that server is to be faster, see to its load.",
        )
    return mistake(
        "judge_unreachable",
        _WHAT,
        where="LOOP_JUDGE_URL",
        found=f"{_server(settings)} gave no answer ({last})",
        mend=f"See that the server runs and that this machine reaches it: `curl -sS {_base(settings)}/models`.",
    )


def _models_of(settings: Settings, key: str | None) -> list[str]:
    """Names of the models that the server says it has; empty where it does not say."""
    import httpx

    try:
        reply = httpx.get(
            f"{_base(settings)}/models",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=PATIENCE_S,
        )
        return [str(one["id"]) for one in reply.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return []


def _base(settings: Settings) -> str:
    return str(settings.judge_url).rstrip("/").removesuffix("/chat/completions")


def _server(settings: Settings) -> str:
    import httpx

    address = httpx.URL(str(settings.judge_url))
    return address.host if address.port is None else f"{address.host}:{address.port}"
