"""What a person may ask of a job's plans, of a store: that of a run on this machine, or an API server's.

    await PlanVerbs(store, job="math", namespace="team", look_s=1.0).answer('{"do": "pin", "name": "math-p2"}')
    {"ok": True, "plan": "math-p2", "message": "math-p2 is in force: ..."}

What is asked becomes writes as `kubectl` would make them: an RLPlan, and spec.placement of the RLJob. The operator does
the rest. For: local/control.py, the door of a run; cluster.py. Not for: what plans say (reasons.py).
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Final, Protocol

from rlinf_api import names, sentences
from rlinf_api.conditions import Reason
from rlinf_api.conditions import written as condition
from rlinf_api.errors import DeadlineExceeded, InvalidManifest, RLinfError, UserError
from rlinf_api.job import PlacementMode
from rlinf_api.store import Listing
from rlinf_scheduler.jobs import plan_manifest
from rljob import by_hand

Manifest = dict[str, Any]
MAX_WAIT_S: Final = 3600.0
UNPINNED: Final = tuple(str(mode) for mode in PlacementMode if mode is not PlacementMode.PINNED)
NOT_APPLIED: Final = frozenset({Reason.PIN_NOT_FOUND, Reason.PIN_REFUSED, Reason.PLAN_FAILED})


class VerbStore(Protocol):
    """An ObjectStore is one. Errors: rlinf_api.store."""

    async def create(self, obj: Manifest) -> Manifest: ...

    async def get(self, kind: str, name: str, *, namespace: str = "default") -> Manifest: ...

    async def list(self, kind: str, *, namespace: str, label_selector: str) -> Listing: ...

    async def patch(self, kind: str, name: str, *, patch: Manifest, namespace: str = "default") -> Manifest: ...


class PlanVerbs:
    """`look_s`: between two looks at whether a plan is in force."""

    def __init__(self, store: VerbStore, *, job: str, namespace: str, look_s: float) -> None:
        self._store, self._job, self._namespace, self._look_s = store, job, namespace, look_s

    async def answer(self, line: bytes | str) -> dict[str, Any]:
        try:
            asked = json.loads(line)
            do = asked.get("do")
            if do == "show":
                return {"ok": True, **await self.show()}
            if do == "set":
                name = await self._write(asked["plan"])
                return await self._pin(name, timeout_s=float(asked.get("timeout_s", 0)))
            if do == "pin":
                return await self._pin(str(asked["name"]), timeout_s=float(asked.get("timeout_s", 0)))
            if do == "rollback":
                return await self._roll_back(timeout_s=float(asked.get("timeout_s", 0)))
            if do == "unpin":
                return await self._unpin(str(asked["mode"]))
            if do == "approve":
                return await self._approve(str(asked["name"]), by=str(asked["by"]))
            return {"ok": False, "message": f"{do!r} is not known here; use rljob of the version that runs the job"}
        except RLinfError as error:
            return {"ok": False, "message": str(error)}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            return {"ok": False, "message": f"the question cannot be read: {error!r}"}

    # --- what can be asked ------------------------------------------------------------------------------------------
    async def show(self) -> dict[str, Any]:
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
        plans = {str(plan["metadata"]["name"]): plan for plan in (await self.show())["plans"]}
        if name not in plans:
            missed = UserError(f"this job has no plan {sentences.shown(name)}", next="nothing was changed")
            return {"ok": False, "plan": name, "message": str(missed)}
        known = (plans[name]["metadata"].get("annotations") or {}).get(names.ANNOTATION_APPROVED_BY)
        if known:
            return {"ok": True, "plan": name, "message": f"{name} was approved by {known} already"}
        patch = {"metadata": {"annotations": {names.ANNOTATION_APPROVED_BY: by}}}
        await self._store.patch("RLPlan", name, patch=patch, namespace=self._namespace)
        return {"ok": True, "plan": name, "message": f"{name} is approved by {by}"}

    async def _roll_back(self, *, timeout_s: float) -> dict[str, Any]:
        """What the plan in force came from, pinned: the scheduler's next one would undo it."""
        found = await self.show()
        current = ((found["job"].get("status") or {}).get("plan") or {}).get("current", "")
        spec = next((p["spec"] for p in found["plans"] if p["metadata"]["name"] == current), None)
        before = int((spec.get("basedOn") or {}).get("revision") or 0) if spec is not None else 0
        named = [str(p["metadata"]["name"]) for p in found["plans"] if p["spec"]["revision"] == before]
        if not named:
            got = f"{current} came from no other" if spec is not None else "no plan in force"
            missed = UserError("there is nothing to go back to", got=got, next="pin one of `rljob plan history`")
            return {"ok": False, "plan": current, "message": str(missed)}
        return await self._pin(named[0], timeout_s=timeout_s)

    async def _unpin(self, mode: str) -> dict[str, Any]:
        """What is in force stays until another comes: of the scheduler, by what is measured."""
        if mode not in UNPINNED:
            raise InvalidManifest("a job cannot be planned so", got=sentences.shown(mode), wanted=", ".join(UNPINNED))
        job = await self._get_job()
        placement = job["spec"].get("placement") or {}
        current = str(((job.get("status") or {}).get("plan") or {}).get("current", ""))
        if placement.get("mode") != PlacementMode.PINNED:
            return {"ok": True, "plan": current, "message": "no plan is pinned"}
        patch = {"spec": {"placement": {"mode": mode, "pin": None}}}
        await self._store.patch("RLJob", self._job, patch=patch, namespace=self._namespace)
        said = f"{placement.get('pin')} is not pinned any more: the scheduler goes on from {current or 'the next plan'}"
        return {"ok": True, "plan": current, "message": said}

    async def _pin(self, name: str, *, timeout_s: float) -> dict[str, Any]:
        """Pinned, and what came of it. A name that no plan bears is not: it would end what is on its way."""
        plans = (await self.show())["plans"]
        known = [str(plan["metadata"]["name"]) for plan in plans]
        if name not in known:
            some = f"one of {', '.join(known[-8:])}" if known else ""
            missed = UserError(f"this job has no plan {sentences.shown(name)}", wanted=some, next="nothing was changed")
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
            await asyncio.sleep(self._look_s)


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
