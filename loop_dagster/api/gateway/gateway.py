"""The gateway of one process: its connections to upstreams, its threads and its recorder.

Belongs here: what lives as long as the process, and how long a call may wait for its recording. Does not belong here:
the steps themselves (the other modules).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import httpx
from fastapi import Request

from loop_dagster.api.calls import Caller, Stores
from loop_dagster.api.gateway.answers import Reader, Said
from loop_dagster.api.gateway.calls import Call, Known, taken_notice
from loop_dagster.api.gateway.planning import Plan, plan
from loop_dagster.api.gateway.recorder import Ended, Place, Recorder, warm_up
from loop_dagster.api.gateway.upstreams import Target, Upstreams
from loop_dagster.store.capturing import Reason

#: Threads that look calls up in the registry, and as many that look up keys: what holds one kind up leaves the others.
THREADS: Final = 4
#: Seconds after which a call is looked up: it goes on to the upstream first.
FIRST_S: Final = 0.002
#: Seconds for a connection to an upstream, and for the list of its models.
CONNECT_S: Final = 10.0
#: Connections that stay open to upstreams.
KEPT_OPEN: Final = 128
#: For how long they do without a call: shorter than servers keep theirs, so that none is closed under a new call.
KEPT_OPEN_S: Final = 3.0
#: Seconds that the start of a server waits for its first look at the registry.
WARM_S: Final = 3.0
#: A key that is used is noted this often.
NOTED_EVERY_S: Final = 60.0
#: For how long calls wait shorter after the registry was too slow for one, and how long then.
PATIENCE_S: Final = 0.5
SLOW_WAIT_S: Final = 0.02


class Gateway:
    """Everything that calls share. Made in a thread of the server; `close` ends it, recording what has passed."""

    def __init__(self, stores: Stores) -> None:
        settings = stores.home.settings
        self.stores = stores
        self.upstreams = Upstreams(settings)
        self.recorder = Recorder()
        self.wait_s = settings.gateway_wait_ms / 1000
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="gateway-plans")
        self._key_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="gateway-keys")
        self._known = Known(stores, self._key_threads, max(self.wait_s, 0.05))
        self._timeout = httpx.Timeout(settings.gateway_timeout_s, connect=CONNECT_S, pool=CONNECT_S)
        self._clients: dict[str | None, httpx.AsyncClient] = {}
        self._slow_until = 0.0
        self._noted: dict[str, float] = {}

    async def warm_up(self) -> None:
        """Do once what the first call would else wait for; a registry that does not answer holds up no start."""
        for target in (*self.upstreams.servers(), self.upstreams.live):
            self.client(target)
        looking = asyncio.get_running_loop().run_in_executor(self._threads, warm_up, self.stores.home, self.recorder)
        looking.add_done_callback(taken_notice)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.shield(looking), WARM_S)

    async def caller(self, request: Request) -> Caller:
        """Who calls; see Known.caller."""
        caller = await self._known.caller(request)
        key, now = caller.key, time.monotonic()
        if now - self._noted.get(key.key_id, -NOTED_EVERY_S) >= NOTED_EVERY_S:
            self._noted[key.key_id] = now
            self.recorder.later(lambda: self.stores.home.keys.note(key))
        return caller

    def client(self, target: Target) -> httpx.AsyncClient:
        """The connections that reach a server, through the proxy that the environment names for it."""
        proxy = target.proxy
        if proxy not in self._clients:
            self._clients[proxy] = httpx.AsyncClient(
                timeout=self._timeout,
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=KEPT_OPEN, keepalive_expiry=KEPT_OPEN_S
                ),
                follow_redirects=False,
                proxy=proxy,
                trust_env=False,  # it would also read passwords of hosts from ~/.netrc
            )
        return self._clients[proxy]

    def recording(self, call: Call) -> Recording | None:
        """Begin to look up whether and how a call is recorded; None when nobody asked for it, or there is no room."""
        if call.off:
            return None
        place = self.recorder.place(call.store, len(call.raw))
        return None if place is None else Recording(self, call, place, self._threads)

    async def waited(self, looking: Future[Plan]) -> bool:
        """Wait for a look-up as long as an answer may wait for it; false when it takes longer.

        Once the registry was too slow, the calls of the next PATIENCE_S wait for SLOW_WAIT_S alone.
        """
        if looking.done():
            return True
        patience = self.wait_s if time.monotonic() > self._slow_until else min(self.wait_s, SLOW_WAIT_S)
        waiting = asyncio.wrap_future(looking)
        waiting.add_done_callback(taken_notice)
        done, _ = await asyncio.wait([waiting], timeout=patience)
        if not done:
            self._slow_until = time.monotonic() + PATIENCE_S
        return bool(done)

    async def close(self) -> None:
        """Record what has passed, close the connections."""
        await asyncio.to_thread(self.recorder.close)
        for threads in (self._threads, self._key_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            await client.aclose()


class Recording:
    """The recording of one call, from the look-up to the recorder's queue."""

    def __init__(self, gateway: Gateway, call: Call, place: Place, threads: ThreadPoolExecutor) -> None:
        self._gateway, self._call, self._place = gateway, call, place
        self._threads = threads
        self._looking: Future[Plan] = Future()
        self._may_promise = self._started = self._handed = False
        self._timer = asyncio.get_running_loop().call_later(FIRST_S, self._start)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._timer.cancel()
            self._threads.submit(self._look)

    def _look(self) -> None:
        if not self._looking.set_running_or_notify_cancel():
            return
        try:
            planned = plan(self._call)
            self._may_promise = planned.sample_id is not None and self._gateway.recorder.takes_writes(self._call.store)
            self._place.plan = planned
            self._looking.set_result(planned)
        except BaseException as error:  # whoever waits for the plan gets it
            self._looking.set_exception(error)

    async def sample_id(self) -> str | None:
        """The id to promise in the answer's head, if the registry has answered by now and will take the sample."""
        self._start()
        if not await self._gateway.waited(self._looking) or self._looking.exception() is not None:
            return None
        planned = self._looking.result()
        if planned.sample_id is None or not self._may_promise:
            return None
        self._place.promised = True
        return planned.sample_id

    def ended(self, reader: Reader) -> None:
        """The answer has passed, or was cut: the recorder takes over."""
        self._start()
        if not self._handed:
            self._handed = True
            read: Said | Reason | None = None

            def result() -> Said | Reason:
                nonlocal read
                read = reader.result() if read is None else read
                return read

            self._gateway.recorder.ended(Ended(self._place, self._planned, result))

    def _planned(self) -> Plan:
        """The plan; looked up once more if the registry did not answer while the call was under way."""
        if self._looking.exception() is None:
            return self._looking.result()
        return plan(self._call)

    def forget(self) -> None:
        """There was no answer: nothing to record and nothing to count."""
        if not self._handed:
            self._handed = True
            self._timer.cancel()
            self._looking.cancel()
            self._gateway.recorder.leave(self._place)
