"""Calls to a judge's server: an OpenAI-compatible one, whatever it knows and however it fails.

Belongs here: one call with its retries and waits, what to leave out for a server that does not know it, what a status
or an error means, the reply's text, and what calls used. Does not belong here: what is asked (`judge_openai.py`).

Neither the key nor any text of a sample stands in an error or a log line of this module. Errors name the class of what
happened or a status, never the words of a server: it may have echoed what it was sent.
"""

from __future__ import annotations

import ipaddress
import json
import math
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from loop_dagster.errors import BadRequest, JudgeRefused, JudgeRejected, JudgeUnavailable, JudgeUnreadable
from loop_dagster.models.judge import Usage
from loop_dagster.models.judge_structured import Structured, StructuredCall

if TYPE_CHECKING:
    import httpx

#: Tries of one call, with random waits of up to 1, 2, 4, 8, 16 s between them, longer where the server asks for it.
TRIES: Final = 6
BACKOFF_S: Final = 1.0
#: The longest wait that is granted to a server; how long a call goes on while the server only limits the rate, which it
#: does as long as a reply has come through within the last so many seconds.
LONGEST_WAIT_S, PATIENCE_S, ALIVE_S = 300.0, 600.0, 60.0
#: Bytes of a reply; a verdict has a few hundred.
MOST_BYTES: Final = 4 * 2**20
#: Tokens of an answer that are asked for when the server has no room for more: a verdict without reasoning.
FEW_TOKENS: Final = 256
#: For a server that does not say what a call used: bytes per token, fewer than most tokenizers need, and what a chat
#: template adds. No tokenizer makes more tokens than there are bytes.
BYTES_PER_TOKEN, TEMPLATE_TOKENS = 3, 256

Reason = Literal["key", "model", "credit"]

_RETRIED: Final = frozenset({408, 409, 425, 429})
_GONE: Final[Mapping[int, Reason]] = {
    401: "key",
    402: "credit",
    403: "key",
    **dict.fromkeys((301, 302, 303, 307, 308, 404, 405, 410), "model"),
}
#: Codes of an error's body that say the same under another status.
_CODES: Final[Mapping[str, Reason]] = {
    "invalid_api_key": "key",
    "model_not_found": "model",
    "model_not_available": "model",
    "insufficient_quota": "credit",
    "billing_hard_limit_reached": "credit",
}
_SAYS: Final[Sequence[tuple[str, Reason]]] = (
    ("api key not valid", "key"),
    ("your credit balance is too low", "credit"),
)

#: Statuses with which servers object to a part of a request that they do not know.
_OBJECTIONS: Final = frozenset({400, 404, 415, 422, 500, 501})
#: The parts that can be left out or put otherwise, with what an objection to each says.
_PARTS: Final[Mapping[str, re.Pattern[str]]] = {
    part: re.compile(said, re.IGNORECASE)
    for part, said in {
        "response_format": r"response_format|json_schema|structured.?output|guided|grammar|parameters? (?:is|are) not",
        "temperature": "temperature",
        "max_tokens": r"\bmax_tokens",
        "max_completion_tokens": "max_completion_tokens",
        "system": r"system[ _-]?(?:role|message|prompt)|role.{0,20}system",
    }.items()
}
_NO_ROOM: Final = re.compile(r"context|too (?:long|large|many)|exceed|maximum", re.IGNORECASE)
#: Ends of a reply that is not whole.
_CUT: Final = frozenset({"length", "max_tokens", "model_length", "content_filter", "error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One call: what the judge is told, the properties of the object that it is to reply, and what it could quote.

    `mark` ends the names of the properties where something that is shown could pass for a verdict. `key` is the same
    when the question is asked again.
    Its representation shows no text, wherever a traceback prints it.
    """

    asked: Literal["ratings", "preference"]
    system: str = field(repr=False)
    user: str = field(repr=False)
    properties: Mapping[str, Any]
    shown: Sequence[str] = field(default=(), repr=False)
    mark: str = ""
    key: int = 0

    @property
    def size(self) -> int:
        """Bytes of its texts."""
        return len(self.system.encode()) + len(self.user.encode())


@dataclass(frozen=True, slots=True)
class _Answered:
    status: int
    retry_after: str | None
    text: str = field(repr=False)


class JudgeServer:
    """`POST <url>/chat/completions`. Safe to use from many threads.

    Structured output is asked for first; a server that does not know it, whether it says so or only fails
    (`judge_structured.py`), is asked in plain words from then on. Waits are random, so that many callers do not come
    back together; a Retry-After holds back all of them, and shortens no wait.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        key: str | None,
        timeout_s: float,
        tries: int,
        backoff_s: float,
        connections: int,
        max_tokens: int,
    ) -> None:
        import httpx

        self._model, self._max_tokens = model, max_tokens
        self._tries, self._backoff_s, self._timeout_s = tries, backoff_s, timeout_s
        self._address = _address(url)
        port = self._address.port
        self._where = self._address.host if port is None else f"{self._address.host}:{port}"
        self._client = httpx.Client(
            headers={"Content-Type": "application/json", **_authorization(key)},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0), pool=None),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=not _is_here(self._address.host),  # a proxy does not reach this machine's own servers
        )
        self._objected: frozenset[str] = frozenset()
        self._structured = Structured()
        self._refused: JudgeRefused | None = None
        self._end = threading.Event()
        self._not_before = 0.0
        self._good_at = -math.inf
        self._count = threading.Lock()
        self._usage = Usage()

    @property
    def usage(self) -> Usage:
        return self._usage

    def ask(self, question: Question) -> str:
        """The text of the judge's reply. Raises the errors of `judge.Judge`."""
        call = self._structured.call(question.key)
        body = self._post(question, call)
        choice = _first(body.get("choices"))
        message = choice.get("message") if choice else None
        text = _text(message.get("content")) if isinstance(message, dict) else None
        self._use(body.get("usage"), question, text or "")
        if text and text.strip():
            call.succeeded()
        else:
            call.empty()
        if choice is None or not isinstance(message, dict):
            raise self._unreadable(question, "sent something that is no chat completion")
        if choice.get("finish_reason") in _CUT:
            raise self._unreadable(question, "was cut off before the end of its reply")
        if not text:
            raise self._unreadable(question, "sent no text")
        return text

    def most(self, question: Question) -> Usage:
        """The most that a call can use: as many tokens as bytes, and all that it may answer with."""
        size = question.size + len(json.dumps(_format(question))) + TEMPLATE_TOKENS
        return Usage(1, size, self._max_tokens)

    def stop(self) -> None:
        """End every wait and every further try."""
        self._end.set()

    def close(self) -> None:
        """`stop`, and close the connections."""
        self.stop()
        self._client.close()

    # --- one call ---

    def _post(self, question: Question, call: StructuredCall) -> dict[str, Any]:
        """The parsed reply. Retries what may pass, raises what will not."""
        import httpx

        began = time.monotonic()
        tried = waits = 0
        while True:
            self._wait_for_all()
            status = 0
            call.begin()
            try:
                answered = self._send(question, plain=call.plain)
            except httpx.RequestError as error:  # its message may name a proxy with a password: the class is enough
                found = type(error).__name__
                timed_out = isinstance(error, httpx.ReadTimeout)
                if timed_out:  # the server has read it, and may bill it
                    self._use(None, question, "")
                if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):  # else it never saw the request
                    call.failed(at_once=not timed_out)
            except _TooMuch:
                found = f"a reply of over {MOST_BYTES:,} bytes"
                call.failed()
            else:
                body = _parsed(answered.text)
                status = _status_in(body) if answered.status == 200 else answered.status
                if status == 200 and body is not _NO_JSON:
                    self._good_at = time.monotonic()
                    return body if isinstance(body, dict) else {}
                found = f"status {status}" if status != 200 else "a reply that is no JSON"  # mostly a proxy's page
                self._look(status, body, answered.retry_after)
                if status not in _RETRIED:
                    call.failed()
            # While others get through, a server that limits the rate is not down: that uses up no try.
            now = time.monotonic()
            limited = status == 429 and now - self._good_at < ALIVE_S and now - began < PATIENCE_S
            waits += 1
            tried += not limited
            if tried >= self._tries and not call.owed:
                raise JudgeUnavailable(self._model, self._where, found, tried)
            # Our own wait also where the server names one: a server that says 0 would be asked without a pause.
            most_s = min(self._backoff_s * 2 ** min(waits - 1, 16), LONGEST_WAIT_S / 5)
            self._end.wait(random.uniform(0.5, 1) * most_s)  # noqa: S311 - jitter

    def _wait_for_all(self) -> None:
        """Wait until the moment that a Retry-After named, and a little longer; raise when there is no further try."""
        while not self._end.is_set() and (left_s := self._not_before - time.monotonic()) > 0:
            self._end.wait(left_s + random.uniform(0, self._backoff_s))  # noqa: S311 - jitter
        if self._refused is not None:
            raise self._refused
        if self._end.is_set():
            raise JudgeUnavailable(self._model, self._where, "it was stopped", 0)

    def _look(self, status: int, body: Any, retry_after: str | None) -> None:
        """Raise for a status that no further try changes; else hold back all calls as long as the server asks for."""
        code, message = _error(body)
        if (reason := _refusal(status, code, message)) is not None:
            self._refused = JudgeRefused(self._model, self._where, status, reason)
            self._end.set()
            raise self._refused
        if status != 200 and status not in _RETRIED and status < 500:
            raise JudgeRejected(self._model, self._where, status)
        asked_s = _seconds(retry_after)
        if asked_s is not None:
            self._not_before = max(self._not_before, time.monotonic() + min(asked_s, LONGEST_WAIT_S))

    def _send(self, question: Question, *, plain: bool) -> _Answered:
        """Send what the server is not known to object to; again without what it objects to, which is remembered.

        `plain` leaves out structured output without saying that the server objects to it.
        """
        tried_without = frozenset({"response_format"} if plain else ())
        dropped, few = self._objected | tried_without, False
        while True:
            answered = self._exchange(self._body(question, dropped, few=few))
            if answered.status == 200:
                self._objected |= dropped - tried_without
                return answered
            if answered.status not in _OBJECTIONS:
                return answered
            if not few and answered.status < 500 and _NO_ROOM.search(answered.text) and self._max_tokens > FEW_TOKENS:
                few = True  # of this call alone: others are shorter
                continue
            sent = {"response_format", "temperature", "system", "max_tokens"} - dropped
            if "max_tokens" in dropped and "max_completion_tokens" not in dropped:
                sent.add("max_completion_tokens")
            objected = {part for part in sent if _PARTS[part].search(answered.text)}
            # A server that names nothing is first tried without structured output, what it knows least.
            if not objected and answered.status in (400, 422, 501):
                objected = {"response_format"} & sent
            if not objected:
                return answered
            dropped |= objected

    def _body(self, question: Question, dropped: frozenset[str], *, few: bool) -> bytes:
        told, asked = question.system, question.user
        messages = [{"role": "system", "content": told}, {"role": "user", "content": asked}]
        if "system" in dropped:
            messages = [{"role": "user", "content": f"{told}\n\n{asked}"}]
        body: dict[str, Any] = {"model": self._model, "messages": messages}
        if "temperature" not in dropped:
            body["temperature"] = 0
        limit = "max_completion_tokens" if "max_tokens" in dropped else "max_tokens"
        if limit not in dropped:
            body[limit] = min(self._max_tokens, FEW_TOKENS) if few else self._max_tokens
        if "response_format" not in dropped:
            body["response_format"] = _format(question)
        return json.dumps(body, ensure_ascii=False).encode()

    def _exchange(self, body: bytes) -> _Answered:
        """One request and its whole reply within the time-out: a server that trickles does not hold a call open."""
        import httpx

        until = time.monotonic() + self._timeout_s
        parts, size = [], 0
        with self._client.stream("POST", self._address, content=body) as response:
            for part in response.iter_bytes():
                parts.append(part)
                size += len(part)
                if size > MOST_BYTES:
                    raise _TooMuch
                if time.monotonic() > until:
                    raise httpx.ReadTimeout("over the time-out")
            text = b"".join(parts).decode("utf-8", "replace")
            return _Answered(response.status_code, response.headers.get("retry-after"), text)

    def _use(self, said: Any, question: Question, text: str) -> None:
        """Add what a call used: what the server says, and an estimate where it says nothing that can be."""
        given = said if isinstance(said, dict) else {}
        prompt = _tokens(given, "prompt_tokens", "input_tokens")
        answer = _tokens(given, "completion_tokens", "output_tokens")
        total = _tokens(given, "total_tokens")
        guessed = prompt is None or answer is None
        if prompt is None:
            prompt = question.size // BYTES_PER_TOKEN + TEMPLATE_TOKENS
        if answer is None:
            answer = len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN + 1
        elif total is not None:
            answer = max(answer, total - prompt)  # some count reasoning in the total alone
        with self._count:
            self._usage += Usage(1, prompt, answer, estimated=int(guessed))

    def _unreadable(self, question: Question, found: str) -> JudgeUnreadable:
        return JudgeUnreadable(self._model, question.asked, found)


class _TooMuch(Exception):
    """The reply does not end."""


# --- addresses and keys ----------------------------------------------------------------------------------------------


def _address(url: str) -> httpx.URL:
    import httpx

    try:
        address = httpx.URL(url.strip())
    except httpx.InvalidURL:
        raise BadRequest("LOOP_JUDGE_URL is no address. It looks like https://judge.example/v1.") from None
    if address.scheme not in ("http", "https") or not re.fullmatch(r"[\w.:%-]+", address.host):
        raise BadRequest("LOOP_JUDGE_URL must be an http(s) address such as https://judge.example/v1.")
    secret = any(re.search(r"key|token|sig|secret|password", name, re.IGNORECASE) for name in address.params)
    if address.userinfo or secret:
        raise BadRequest(
            "LOOP_JUDGE_URL must hold no user name, password or key, since addresses are logged; the key belongs in "
            "LOOP_JUDGE_API_KEY."
        )
    path = address.path.rstrip("/").removesuffix("/chat/completions")
    return address.copy_with(path=path + "/chat/completions", fragment=None)


def _authorization(key: str | None) -> dict[str, str]:
    """The header for a key. A key that no header can hold is refused here: an error of the wire would quote it."""
    key = (key or "").strip()
    if not key:
        return {}
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise BadRequest(
            "LOOP_JUDGE_API_KEY holds a space, a line break or a sign beyond ASCII; a key has none of them."
        )
    return {"Authorization": f"Bearer {key}"}


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


# --- what a server says ----------------------------------------------------------------------------------------------


def _format(question: Question) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": dict(question.properties),
        "required": list(question.properties),
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": question.asked, "strict": True, "schema": schema}}


_NO_JSON: Final = object()


def _parsed(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return _NO_JSON


def _first(choices: Any) -> dict[str, Any] | None:
    """The one choice of a chat completion."""
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _text(content: Any) -> str | None:
    """Content as text: itself, or its parts of text joined; parts of any other kind (reasoning) are no verdict."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") in _TEXT_PARTS]
    return "".join(part for part in parts if isinstance(part, str))


_TEXT_PARTS: Final = ("text", "output_text")


def _error(body: Any) -> tuple[str, str]:
    """(code, message) of an error's body, in lower case, empty where there is none."""
    if isinstance(body, list) and body:
        body = body[0]
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return "", str(error or "").lower()
    code = next((error[key] for key in ("code", "type") if isinstance(error.get(key), str)), "")
    return code.lower(), str(error.get("message") or "").lower()


def _status_in(body: Any) -> int:
    """The status that a reply of status 200 hides: some servers put an error there instead of a completion."""
    error = body.get("error") if isinstance(body, dict) and not body.get("choices") else None
    code = error.get("code") if isinstance(error, dict) else None
    with suppress(TypeError, ValueError):
        if 400 <= int(code) < 600:  # type: ignore[arg-type]  # anything else is caught
            return int(code)  # type: ignore[arg-type]
    return 200


def _refusal(status: int, code: str, message: str) -> Reason | None:
    """Why no further call can succeed, None when one may. The message is a server's own only at its beginning."""
    if status == 403 and re.match(r".{0,60}(?:moderation|flagged)", message):
        return None  # of this text alone
    if 400 <= status < 500:
        if code in _CODES:
            return _CODES[code]
        for said, reason in _SAYS:
            if message.startswith(said):
                return reason
    return _GONE.get(status)


def _tokens(usage: Mapping[str, Any], *names: str) -> int | None:
    """A count of tokens under any of its names; none where it is no whole number above zero."""
    for name in names:
        value = usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**9:
            return value
    return None


def _seconds(retry_after: str | None) -> float | None:
    """Seconds that a Retry-After header asks for: a number, or a date; None where it asks for no time at all."""
    seconds = math.nan
    with suppress(ValueError, OverflowError):
        seconds = parsedate_to_datetime(retry_after or "").timestamp() - time.time()
    with suppress(ValueError):
        seconds = float(retry_after or "")
    return seconds if 0 < seconds < math.inf else None
