"""RLJobs of the entries of tests/workloads/workloads.jsonl, and running them: the roles of an entry become roles of
kind `synthetic` word for word, its pools become pools of the job.

    python -m tools.workloads list
    python -m tools.workloads manifest drawn-03 [--mode Collocated] [--items 16] [--time-scale 0.2]
    python -m tools.workloads run drawn-03 drawn-04 | --all     one after the other, a line each

docs/synthetic.md says what the numbers mean. Not for: planning, which never reads a workload.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
WORKLOADS: Final = ROOT / "tests" / "workloads" / "workloads.jsonl"
MAX_PER_POD: Final = 64
RUN_TIMEOUT_S: Final = 300.0
ROUNDS_PER_STEP: Final = 4
"""Micro-batches that each worker takes of a step, where nobody has planned: enough to stream, few enough that
perBatchMs does not dominate."""

Entry = Mapping[str, Any]


def entries(path: Path = WORKLOADS) -> dict[str, Entry]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {entry["name"]: entry for entry in map(json.loads, lines)}


def job(
    entry: Entry,
    *,
    mode: str = "Auto",
    steps: int = 3,
    seed: int = 1,
    items: int | None = None,
    time_scale: float = 1.0,
    hybrid: bool = False,
) -> dict[str, Any]:
    """The manifest. `items` and `time_scale` make a smaller one of the same shape; 1.0 is the entry as it stands.
    `hybrid`: the first role of each pool has half of its slots to itself, the others take turns on the rest."""
    if hybrid:
        entry, mode = {**entry, "pools": [part for pool in entry["pools"] for part in _halves(pool)]}, "Collocated"
    count = min(items or entry["items"], entry["items"])
    config: dict[str, Any] = {
        "workload": entry["name"],
        "items": count,
        "edges": [_scaled(edge, time_scale) for edge in entry["edges"]],
        "channels": _channels(entry, count),
        "speeds": {p["name"]: p["speed"] for p in entry["pools"] if "speed" in p},
    }
    config["cycles"] = [{"stages": 2, **_scaled(cycle, time_scale)} for cycle in cycles_of(entry)]
    if "units" in entry:  # as many of each item, however many these are
        config["units"] = {name: n * count // entry["items"] for name, n in entry["units"].items()}
    config |= {key: entry[key] for key in ("sealed", "tokens") if key in entry}
    if "drift" in entry:
        config["drift"] = entry["drift"]
    return {
        "apiVersion": "rlinf.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": entry["name"]},
        "spec": {
            "seed": seed,
            "flow": {
                "name": "synthetic",
                "steps": steps,
                "maxStaleness": entry.get("staleness", 0),
                "config": config,
            },
            "roles": [_role(role, entry, time_scale) for role in entry["roles"]],
            "pools": [_pool(pool) for pool in entry["pools"]],
            "placement": {"mode": mode},
        },
    }


def cycles_of(entry: Entry) -> list[Mapping[str, Any]]:
    """An entry has one `cycle`, or several `cycles`."""
    return [entry["cycle"]] if "cycle" in entry else list(entry.get("cycles", ()))


def _role(role: Mapping[str, Any], entry: Entry, time_scale: float) -> dict[str, Any]:
    slots = sum(p["slots"] for p in entry["pools"] if role["name"] in p["roles"])
    per_worker = role.get("slotsPerWorker", 1)
    ranks = [r for r in role.get("ranks", ()) if r * per_worker <= slots]
    most = max(1, slots // per_worker)
    return {
        "name": role["name"],
        "kind": "synthetic",
        "slotsPerWorker": per_worker,
        "workers": {"min": min(ranks, default=1), "max": max(ranks, default=most)},
        "config": _scaled(role, time_scale),
    }


def _halves(pool: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    first, *others = pool["roles"]
    half = pool["slots"] // 2
    if not others or not half:
        return [pool]
    return [
        {**pool, "name": f"{pool['name']}-a", "slots": half, "roles": [first]},
        {**pool, "name": f"{pool['name']}-b", "slots": pool["slots"] - half, "roles": others},
    ]


def _pool(pool: Mapping[str, Any]) -> dict[str, Any]:
    pods = math.ceil(pool["slots"] / MAX_PER_POD)
    slots = {"perPod": pool["slots"] // pods, "cpu": "10m", "memory": f"{math.ceil(pool['memory'])}Mi"}
    return {"name": pool["name"], "roles": pool["roles"], "pods": pods, "slots": slots}


def _scaled(value: Any, factor: float, name: str = "") -> Any:
    """Every time in it times the factor: fields whose name ends in Ms."""
    if isinstance(value, Mapping):
        return {key: _scaled(part, factor, key) for key, part in value.items()}
    if isinstance(value, list):
        return [_scaled(part, factor) for part in value]
    return value * factor if name.endswith("Ms") else value


def _channels(entry: Entry, items: int) -> dict[str, Any]:
    """A share of the slots for each role: what a person would write who knows nothing of the costs."""
    roles = {role["name"]: role for role in entry["roles"]}
    slots = sum(pool["slots"] for pool in entry["pools"])
    workers = max(1, slots // len(roles))
    batch = max(1, round(items / workers / ROUNDS_PER_STEP))
    edges = [e for e in entry["edges"] if not e.get("weights")]
    fed = {e["to"] for e in edges}
    cycles = [cycle["roles"] for cycle in cycles_of(entry)]
    firsts = [name for name in roles if name not in fed and name not in {back for _, back in cycles}]
    found = {f"{e['from']}-{e['to']}": roles[e["to"]] for e in edges}
    found |= {"tickets" if len(firsts) == 1 else f"tickets-{name}": roles[name] for name in firsts}
    fronts = {front for front, _ in cycles}
    return {
        channel: {"microBatch": 1, "depth": items}
        if role["name"] in fronts
        else {"microBatch": 1, "depth": max(2, role.get("lanes", 1) // 4)}
        if role["service"] == "concurrent"
        else {"microBatch": batch, "depth": 2}
        for channel, role in found.items()
    }


def run(manifest: Mapping[str, Any], work_dir: Path, *, timeout_s: float = RUN_TIMEOUT_S) -> dict[str, Any]:
    """`rljob run` of it; the object that it ends with."""
    path = work_dir / "job.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(manifest)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "rljob", "run", str(path), "--output", "json", "--work-dir", str(work_dir / "work")],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    if not done.stdout.strip():
        raise RuntimeError(f"rljob run exited with {done.returncode} and said {done.stderr[-2000:]!r}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.workloads", description=__doc__)
    parser.add_argument("command", choices=("list", "manifest", "run"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true", help="every entry of the file")
    parser.add_argument("--mode", default="Auto", help="spec.placement.mode")
    parser.add_argument("--hybrid", action="store_true", help="the first role beside the others, which take turns")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--items", type=int)
    parser.add_argument("--time-scale", type=float, default=1.0)
    args = parser.parse_args(arguments)
    known = entries()
    names = list(known) if args.all or (args.command == "list" and not args.names) else args.names
    failed = 0
    for name in names:
        if name not in known:
            print(f"{name}: got a name that {WORKLOADS.name} does not have; wanted one of {', '.join(known)}")
            return 2
        entry = known[name]
        manifest = job(
            entry, mode=args.mode, steps=args.steps, items=args.items, time_scale=args.time_scale, hybrid=args.hybrid
        )
        if args.command == "list":
            print(f"{name}: {entry['items']} items, {', '.join(role['name'] for role in entry['roles'])}")
        elif args.command == "manifest":
            print(yaml.safe_dump(manifest, sort_keys=False))
        else:
            failed += not _run_one(entry, manifest)
    return 1 if failed else 0


def _run_one(entry: Entry, manifest: Mapping[str, Any]) -> bool:
    """True: it ended as it should; an infeasible one by being refused."""
    with tempfile.TemporaryDirectory(prefix="workload-") as folder:
        answer = run(manifest, Path(folder))
    wanted = "Invalid" if entry.get("infeasible") else "Complete"
    print(
        f"{entry['name']}: {answer['condition']} after {answer['steps']} steps in {answer['wall_s']:.1f} s, wanted "
        f"{wanted}: {answer['message'][:200]}",
        flush=True,
    )
    return bool(answer["condition"] == wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
