"""Kopf: its registry, its settings, and the one handler, which enqueues a key.

Kopf runs in a thread with an event loop of its own. It would otherwise take over SIGTERM of the whole process, and at
its end cancel every task that was started after it, passes of jobs among them (`run_tasks`, 1.45.2).

| thread | task | consumes | waits for | unblocked by |
|---|---|---|---|---|
| kopf | Kopf's own | RLJobs by list and watch | an event | the API server; `watching.inactivity_timeout`; stop() |
| kopf | a beat | - | BEAT_S | time |
| main | Watcher.ended | - | the thread's end | stop(), or Kopf giving up: then the process ends |

What Kopf is trusted with, and what it is not (docs/adr/0004, 0060): an event makes a pass happen sooner. Whether its
watch still tells is looked at (known.py); what a pass decides on is read anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import kopf

from rlinf_api import names
from rlinf_operator.handlers.known import BEAT_S, Sight
from rlinf_operator.manifests.metadata import JobKey

logger = logging.getLogger(__name__)
STOP_TIMEOUT_S: Final = 2.0  # below what the leader has for its end; it takes 0.1 s
BACKOFFS_S: Final = (0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 30.0)
"""Kopf's pauses after a call that failed; after the last one it gives up, and the process begins anew."""
INACTIVITY_S: Final = 90.0  # bookmarks come every minute


class JobsEar(Protocol):
    """Who is told, in the event loop that made the Watcher."""

    def seen(self, sight: Sight) -> None: ...

    def beat(self) -> None: ...


class Unending:
    """The same pauses, of which the last one comes again and again: with listed namespaces each has a watch of its own,
    and one that is refused, as its namespace was deleted, must not end those of the others."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain(BACKOFFS_S, itertools.repeat(BACKOFFS_S[-1]))


class NothingHandled(kopf.DiffBaseStorage):
    """Kopf compares each object with what a handler of its changes saw last. There is no such handler, and the copies
    that are made for the comparison are a fifth of what an event costs."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """There is nothing to be kept."""


def registry(
    told: JobsEar, *, login: kopf.ConnectionInfo | None = None, listed: bool = False, inactivity_s: float = INACTIVITY_S
) -> kopf.OperatorRegistry:
    """A registry of one's own: Kopf's default one is global, and a second operator in a process would share it.
    `told` is called in Kopf's thread. `listed`: some namespaces are watched and not all."""
    own = kopf.OperatorRegistry()

    @kopf.on.startup(registry=own)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False  # events are apply.py's, after the status was written
        settings.peering.standalone = True  # who leads is decided by the Lease
        settings.persistence.diffbase_storage = NothingHandled()
        settings.scanning.disabled = True  # no permission to list CRDs and namespaces is asked for
        settings.process.ultimate_exiting_timeout = None  # it would kill the process with SIGKILL
        settings.watching.server_timeout = 300
        settings.watching.connect_timeout = 10
        settings.watching.chunk_size = 100  # a thousand RLJobs at once would be 8 MB of text and 50 MB decoded
        settings.watching.inactivity_timeout = inactivity_s
        settings.networking.request_timeout = 30
        settings.networking.enforce_retry_after = True
        settings.networking.error_backoffs = Unending() if listed else BACKOFFS_S
        settings.queueing.exit_timeout = 0.5

    @kopf.on.login(registry=own)
    def log_in(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return login or kopf.login_with_service_account(**kwargs)  # asked again when the token was refused

    @kopf.on.startup(registry=own)
    async def live(**_: Any) -> None:
        loop = asyncio.get_running_loop()

        def beat() -> None:
            told.beat()
            loop.call_later(BEAT_S, beat)

        beat()

    @kopf.on.event(names.GROUP, names.VERSION, "rljobs", registry=own)
    async def rljob_seen(body: kopf.Body, meta: kopf.Meta, type: str | None, **_: Any) -> None:
        if type == "DELETED":
            told.seen(Sight(key=JobKey(namespace=str(meta["namespace"]), name=str(meta["name"]))))
        else:
            told.seen(Sight.of(body, is_listed=type is None))

    return own


def login_of(settings: Any) -> kopf.ConnectionInfo | None:
    """What kubernetes.aio read from a kubeconfig, for Kopf. None in a pod: the service account's token changes."""
    if settings.refresh_api_key_hook is not None:
        return None
    token = str(settings.api_key.get("BearerToken") or "").removeprefix("Bearer ") or None
    return kopf.ConnectionInfo(
        server=settings.host,
        ca_path=settings.ssl_ca_cert,
        insecure=not settings.verify_ssl,
        certificate_path=settings.cert_file,
        private_key_path=settings.key_file,
        token=token,
    )


class _Across:
    """From Kopf's thread to the loop of whoever is told."""

    def __init__(self, loop: asyncio.AbstractEventLoop, told: JobsEar) -> None:
        self._loop, self._told = loop, told

    def seen(self, sight: Sight) -> None:
        self._loop.call_soon_threadsafe(self._told.seen, sight)

    def beat(self) -> None:
        self._loop.call_soon_threadsafe(self._told.beat)


class Watcher:
    """Kopf, from start() to stop(). `ended` is set in the caller's loop when its thread is over."""

    def __init__(
        self,
        told: JobsEar,
        *,
        namespaces: Sequence[str] = (),
        login: kopf.ConnectionInfo | None = None,
        inactivity_s: float = INACTIVITY_S,
    ) -> None:
        """`inactivity_s`: after so long a watch that says nothing is opened anew."""
        self.ended = asyncio.Event()
        self._told, self._namespaces, self._login = told, tuple(namespaces), login
        self._inactivity_s = inactivity_s
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        self._stop.set()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.ended.wait()
        except TimeoutError:  # a daemon thread: it cannot keep the process, and it writes nothing
            logger.warning("kopf did not stop", extra={"timeout_s": STOP_TIMEOUT_S})

    def _run(self) -> None:
        own = registry(
            _Across(self._loop, self._told),
            login=self._login,
            listed=bool(self._namespaces),
            inactivity_s=self._inactivity_s,
        )
        try:
            kopf.run(
                registry=own,
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
                stop_flag=self._stop,
            )
        except Exception:  # top of a thread: logged, and its end ends the process
            logger.exception("kopf gave up")
        finally:
            with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
                self._loop.call_soon_threadsafe(self.ended.set)
