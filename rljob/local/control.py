"""The door of a running `rljob run` for other commands of the same user: a unix socket in the work dir, mode 0600.

One connection, one question, one answer, a line of JSON each; `rljob/plan.py` asks. What is asked becomes writes to the
store, as `kubectl` would make them: an RLPlan, and spec.placement of the RLJob. The operator does the rest.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| one per connection, MAX_CALLS | a question | a line; the plan in force or refused | the peer; its deadline |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rlinf_api import names, sentences
from rlinf_api.conditions import Reason
from rlinf_api.errors import DeadlineExceeded, InvalidManifest, RLinfError, UserError
from rlinf_api.job import PlacementMode
from rlinf_scheduler.jobs import plan_manifest
from rljob.local import by_hand, room
from rljob.local.objects import Manifest, condition
from rljob.local.store import MemoryStore

logger = logging.getLogger(__name__)
SOCKET: Final = "control.sock"
MAX_LINE: Final = 4 << 20  # bytes: a plan's largest fields together are below
MAX_CALLS: Final = 16
READ_TIMEOUT_S: Final = 5.0  # a caller that connects has its question at hand
MAX_WAIT_S: Final = 3600.0
LOOK_S: Final = 0.05  # the store is in memory: a look costs microseconds
NOT_APPLIED: Final = frozenset({Reason.PIN_NOT_FOUND, Reason.PIN_REFUSED, Reason.PLAN_FAILED})


@contextlib.contextmanager
def reached(work_dir: Path) -> Iterator[str]:
    """A path to the socket that Linux takes, however long the work dir's own is: by the folder's file descriptor."""
    folder = os.open(work_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


class Control:
    """`async with Control(store, job=..., namespace=..., work_dir=...)`: open for as long as the block lasts."""

    def __init__(self, store: MemoryStore, *, job: str, namespace: str, work_dir: Path) -> None:
        self._store, self._job, self._namespace, self._work_dir = store, job, namespace, work_dir
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        """UserError where the work dir's file system takes no socket."""
        path = self._work_dir / SOCKET
        mask = os.umask(0o177)
        try:
            path.unlink(missing_ok=True)  # left by a run that was killed; the work dir's lock says that none is alive
            with reached(self._work_dir) as short:
                self._server = await asyncio.start_unix_server(self._serve, path=short, limit=MAX_LINE)
        except OSError as error:
            raise UserError(
                f"work dir {self._work_dir} cannot be used", got=room.told(error, path),
                wanted="a file system with unix sockets", next="choose another --work-dir",
            ) from error  # fmt: skip
        finally:
            os.umask(mask)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        (self._work_dir / SOCKET).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._calls) >= MAX_CALLS:
                await _say(writer, {"ok": False, "message": f"{MAX_CALLS} commands are under way; try again"})
                return
            self._calls.add(task)
            async with asyncio.timeout(READ_TIMEOUT_S):
                line = await reader.readline()
            await _say(writer, await self._answer(line))
        except asyncio.CancelledError:  # the run ends; raised on, asyncio would log it as a failure of ours
            writer.write(json.dumps({"ok": False, "message": "the run ended before it"}).encode() + b"\n")
        except (TimeoutError, ValueError, ConnectionError) as error:
            logger.info("a command said nothing that can be read", extra={"error": str(error)})
        finally:
            self._calls.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            asked = json.loads(line)
            do = asked.get("do")
            if do == "show":
                return {"ok": True, **await self._show()}
            if do == "set":
                name = await self._write(asked["plan"])
                return await self._pin(name, timeout_s=float(asked.get("timeout_s", 0)))
            if do == "pin":
                return await self._pin(str(asked["name"]), timeout_s=float(asked.get("timeout_s", 0)))
            if do == "approve":
                return await self._approve(str(asked["name"]), by=str(asked["by"]))
            return {"ok": False, "message": f"{do!r} is not known here; use rljob of the version that runs the job"}
        except RLinfError as error:
            return {"ok": False, "message": str(error)}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            return {"ok": False, "message": f"the question cannot be read: {error!r}"}

    # --- what can be asked ------------------------------------------------------------------------------------------
    async def _show(self) -> dict[str, Any]:
        job, plans = await self._get_job(), await self._plans()
        return {"job": job, "plans": sorted(plans, key=lambda p: int(p["spec"]["revision"]))}

    async def _get_job(self) -> Manifest:
        return await self._store.get("RLJob", self._job, namespace=self._namespace)

    async def _plans(self) -> list[Manifest]:
        selector = f"{names.LABEL_JOB}={self._job}"
        return list((await self._store.list("RLPlan", namespace=self._namespace, label_selector=selector)).items)

    async def _write(self, given: Any) -> str:
        """The RLPlan's name. What a person would have to look up is filled in: the job, the next revision."""
        job, plans = await self._get_job(), await self._plans()
        revision = max((int(p["spec"]["revision"]) for p in plans), default=0) + 1
        plan = by_hand.filled_in(given, job=self._job, uid=job["metadata"]["uid"], revision=revision)
        manifest = plan_manifest(plan, namespace=self._namespace)
        known = next((p for p in plans if p["metadata"]["name"] == manifest["metadata"]["name"]), None)
        if known is None:
            await self._store.create(manifest)
        elif known["spec"] != manifest["spec"]:
            raise InvalidManifest(
                f"revision {plan.revision} exists with another spec, and plans are immutable",
                next="leave out spec.revision: the next one is taken",
            )
        return str(manifest["metadata"]["name"])

    async def _approve(self, name: str, *, by: str) -> dict[str, Any]:
        """The first one counts: who approved a plan is not written over."""
        plans = {str(plan["metadata"]["name"]): plan for plan in (await self._show())["plans"]}
        if name not in plans:
            missed = UserError(f"this run has no plan {sentences.shown(name)}", next="nothing was changed")
            return {"ok": False, "plan": name, "message": str(missed)}
        known = (plans[name]["metadata"].get("annotations") or {}).get(names.ANNOTATION_APPROVED_BY)
        if known:
            return {"ok": True, "plan": name, "message": f"{name} was approved by {known} already"}
        patch = {"metadata": {"annotations": {names.ANNOTATION_APPROVED_BY: by}}}
        await self._store.patch("RLPlan", name, patch=patch, namespace=self._namespace)
        return {"ok": True, "plan": name, "message": f"{name} is approved by {by}"}

    async def _pin(self, name: str, *, timeout_s: float) -> dict[str, Any]:
        """Pinned, and what came of it. A name that no plan bears is not: it would end what is on its way."""
        plans = (await self._show())["plans"]
        known = [str(plan["metadata"]["name"]) for plan in plans]
        if name not in known:
            some = f"one of {', '.join(known[-8:])}" if known else ""
            missed = UserError(f"this run has no plan {sentences.shown(name)}", wanted=some, next="nothing was changed")
            return {"ok": False, "plan": name, "message": str(missed)}
        patch = {"spec": {"placement": {"mode": str(PlacementMode.PINNED), "pin": name}}}
        pinned = await self._store.patch("RLJob", self._job, patch=patch, namespace=self._namespace)
        generation = int(pinned["metadata"].get("generation", 1))
        deadline = time.monotonic() + min(MAX_WAIT_S, timeout_s)
        while True:
            job = await self._get_job()
            if (ended := _outcome(job, name, generation=generation)) is not None:
                return ended
            if time.monotonic() >= deadline:
                said = condition(job, "PlanApplied").get("message", "")
                late = DeadlineExceeded(f"plan {name} coming into force", timeout_s=timeout_s, missing=said)
                return {"ok": False, "plan": name, "message": str(late)}
            await asyncio.sleep(LOOK_S)


def _outcome(job: Manifest, name: str, *, generation: int) -> dict[str, Any] | None:
    """None while the plan is on its way, or the operator has not seen the pin yet."""
    applied = condition(job, "PlanApplied")
    status = job.get("status") or {}
    for kind in ("Complete", "Failed"):
        if condition(job, kind).get("status") == "True":
            message = f"the job ended before it: {condition(job, kind)['message']}"
            return {"ok": False, "plan": name, "message": message}
    seen = int(applied.get("observedGeneration", 0)) >= generation
    message, in_force = applied.get("message", ""), (status.get("plan") or {}).get("current") == name
    if seen and applied.get("status") == "True" and in_force:
        return {"ok": True, "plan": name, "message": message}
    placement = job["spec"].get("placement") or {}
    taken_back, pin = placement.get("mode") != PlacementMode.PINNED, placement.get("pin")
    if taken_back or pin != name:  # what else PlanApplied says may be of that one
        overtaken = "the pin was taken back" if taken_back else f"{pin} was pinned"
        return {"ok": False, "plan": name, "message": f"{overtaken} meanwhile, before {name} came into force"}
    if seen and applied.get("status") == "False" and applied.get("reason") in NOT_APPLIED:
        return {"ok": False, "plan": name, "message": message}
    return None


async def _say(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")
    async with asyncio.timeout(READ_TIMEOUT_S):
        await writer.drain()
