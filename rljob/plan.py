"""`rljob plan`: looks at the plans of a run that goes on in a work dir, or of a job of a cluster, and changes the one
in force by hand.

    rljob plan show WORKDIR                  plans with their conditions
    rljob plan show WORKDIR --yaml           the plan in force, to be edited and set
    rljob plan set WORKDIR FILE              a new revision, pinned; waits until it is in force, or why it is not
    rljob plan pin WORKDIR NAME              an older one again
    rljob plan unpin WORKDIR                 the scheduler goes on from the one in force
    rljob plan rollback WORKDIR              what the one in force came from
    rljob plan approve WORKDIR NAME          one that waits for approval may come into force
    rljob plan pin JOB NAME -n NAMESPACE     the same on a cluster, as the person of the kubeconfig

Not for: deciding anything. What is asked goes to the run by its control socket, or to the API server; docs/plans.md
says what happens then.
"""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from rlinf_api import storable
from rlinf_api.errors import InvalidManifest, UserError
from rljob import documents
from rljob.local.control import MAX_LINE, SOCKET, reached

if TYPE_CHECKING:
    from rljob.cluster import Cluster

CALL_MARGIN_S: Final = 10.0  # beyond what the run itself waits: its answer is on the way
FILLED_IN: Final = ("job", "revision", "basedOn", "source", "reason", "predicted", "alternatives")


Where = Path | tuple[str, "Cluster"]
"""The work dir of a run, or a job of a cluster."""


def show(where: Where, *, as_yaml: bool) -> str:
    answer = _ask(where, {"do": "show"}, timeout_s=CALL_MARGIN_S)
    job, plans = answer["job"], answer["plans"]
    status = (job.get("status") or {}).get("plan") or {}
    if as_yaml:
        current = next((p for p in plans if p["metadata"]["name"] == status.get("current")), None)
        if current is None:
            raise UserError("no plan is in force yet", next="wait until the run says so")
        spec = {name: value for name, value in current["spec"].items() if name not in FILLED_IN}
        return str(yaml.safe_dump({"spec": spec}, sort_keys=False))
    return "\n".join(_line(plan, status) for plan in plans) or "no plan is there yet"


def _line(plan: dict[str, Any], status: dict[str, Any]) -> str:
    name, spec = plan["metadata"]["name"], plan["spec"]
    mark = "*" if name == status.get("current") else ("+" if name == status.get("pending") else " ")
    workers = ", ".join(f"{w['count']} {w['role']} on {w['slots']}" for w in spec["workers"])
    true = [c["type"] for c in (plan.get("status") or {}).get("conditions", ()) if c["status"] == "True"]
    failed = [c["message"] for c in (plan.get("status") or {}).get("conditions", ()) if c["type"] == "Failed"]
    return f"{mark} {name}  {spec['source']}  {' '.join(true) or '-'}  {workers}" + "".join(
        f"\n    {m}" for m in failed
    )


def put(where: Where, file: Path, *, timeout_s: float) -> tuple[bool, str]:
    """(whether it is in force, a sentence)."""
    return _changed(where, {"do": "set", "plan": read(file)}, timeout_s=timeout_s)


def pin(where: Where, name: str, *, timeout_s: float) -> tuple[bool, str]:
    return _changed(where, {"do": "pin", "name": name}, timeout_s=timeout_s)


def unpin(where: Where, *, mode: str) -> tuple[bool, str]:
    answer = _ask(where, {"do": "unpin", "mode": mode}, timeout_s=CALL_MARGIN_S)
    return bool(answer["ok"]), str(answer.get("message", ""))


def roll_back(where: Where, *, timeout_s: float) -> tuple[bool, str]:
    return _changed(where, {"do": "rollback"}, timeout_s=timeout_s)


def approve(where: Where, name: str, *, by: str) -> tuple[bool, str]:
    """As `pin`; the run takes it from there."""
    answer = _ask(where, {"do": "approve", "name": name, "by": by or getpass.getuser()}, timeout_s=CALL_MARGIN_S)
    return bool(answer["ok"]), str(answer.get("message", ""))


def _changed(where: Where, question: dict[str, Any], *, timeout_s: float) -> tuple[bool, str]:
    answer = _ask(where, {**question, "timeout_s": timeout_s}, timeout_s=timeout_s)
    return bool(answer["ok"]), str(answer.get("message", ""))


def read(file: Path) -> Any:
    """The one plan of a file, as an API server would store it."""
    found = documents.of_file(file, what=f"plan {file}")
    if len(found) != 1:
        raise InvalidManifest(
            f"plan {file} must hold one plan", got=f"{len(found)} documents", next="start from `rljob plan show --yaml`"
        )
    return json.loads(storable.dumps(found[0]))


def _ask(where: Where, question: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    if isinstance(where, Path):
        answer = _asked_of_run(where, question, timeout_s=timeout_s)
    else:
        from rljob import cluster

        answer = cluster.ask(*where, question)
    if not answer.get("ok") and "plan" not in answer:
        raise UserError(str(answer.get("message", "refused without a reason")))
    return answer


def _asked_of_run(work_dir: Path, question: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    line = json.dumps(question).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise InvalidManifest("the plan is too large", got=f"{len(line)} bytes", wanted=f"at most {MAX_LINE}")
    nobody = UserError(f"no rljob runs in {work_dir}", next="give the work dir of a run that goes on")
    try:
        with reached(work_dir) as path, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s + CALL_MARGIN_S)
            connection.connect(path)
            connection.sendall(line)
            text = connection.makefile("rb").readline(4 * MAX_LINE)
    except TimeoutError as error:
        raise UserError(f"the run in {work_dir} does not answer", got=f"nothing within {timeout_s:g} s") from error
    except OSError as error:
        raise UserError(nobody.what, got=f"{SOCKET}: {error.strerror or error}", next=nobody.next) from error
    if not text:
        raise UserError(f"the run in {work_dir} ended meanwhile")
    return dict(json.loads(text))
