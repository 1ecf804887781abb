"""Synthetic roles in a real run: they take the time that their numbers say, weigh little, and any workload runs."""

import json
import resource
import statistics
import subprocess
import sys
from collections import defaultdict
from functools import partial
from itertools import pairwise

import pytest
import yaml

from rlinf_worker.channels import lineage
from rlinf_worker.roles.synthetic.figures import Figures
from rljob import timeline
from tests.cluster import bars
from tests.rljob_runs import ROOT, Run
from tools import workloads
from tools.bench.runtime_parts import start

MIB = 1 << 20
STEPS = 8
HEARD_LATE_S = 0.1
"""A process that waits for a core hears a few slices of the scheduler late; 2 ms on an idle machine."""
WORKERS_OF_DRAWN_00 = ("rollout/0", "rollout/1", "reference/0", "train/0")


def file_of(tmp_path, manifest):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    return path


def spans_of(run):
    lines = [line for path in (run.work_dir / "spans").glob("*.jsonl") for line in path.read_text().splitlines()]
    return [span for span in map(json.loads, lines) if "kind" in span]


def expected(entry, *, items):
    """Seconds of compute that a whole run should come to, by role: without what belongs to each micro-batch."""
    keys = [
        (lineage.sample(entry["name"], step, index=i, sample=0), step) for step in range(1, STEPS + 1) for i in items
    ]
    found = {}
    for role in entry["roles"]:
        figures = Figures.of(role, role=role["name"], workload=entry["name"], slots=role.get("slotsPerWorker", 1))
        cost = figures.lane_s if figures.concurrent else figures.item_s
        found[role["name"]] = (figures, sum(cost(key, step=step) for key, step in keys))
    return found


@pytest.mark.timeout(120)
def test_workers_take_the_time_of_their_definition(tmp_path):
    """Within 2%, as late wake-ups are made up for; the last of each lane is not."""
    entry = json.loads(json.dumps(workloads.entries()["paper-ppo7b"]))
    for role in entry["roles"]:
        role["time"]["jitter"] = 0.0
        if role["service"] == "serial":
            role["time"]["perItemMs"] = 12.0  # seconds per worker: the last wake-up, which nothing follows, is late
    items = 64
    manifest, began = workloads.job(entry, steps=STEPS, items=items), bars.look()
    with Run(tmp_path, file=file_of(tmp_path, manifest), small=False) as run:
        assert run.end() == 0, run.said
        spans = [s for s in spans_of(run) if s["kind"] == "compute"]
    batches: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        batches[span["role"]] += 1
        seconds[span["role"]] += span["t1"] - span["t0"]
    for role, (figures, of_items) in expected(entry, items=range(items)).items():
        pieces = batches[role] - items * STEPS if figures.concurrent else batches[role]
        if figures.gang:  # the ranks of a round, each with its share of the units
            assert pieces % 2 == 0
        wanted = of_items + pieces * figures.per_batch_s
        assert seconds[role] == bars.near(wanted, rel=0.02, since=began), role


def of_role(spans, role, kind):
    """In order of time."""
    return sorted((s for s in spans if (s["role"], s["kind"]) == (role, kind)), key=lambda s: s["t0"])


def total_s(spans):
    return sum(span["t1"] - span["t0"] for span in spans)


TRIPS, HOP_MS, EDGE_SYNC_MS, GANG_SYNC_MS = 2, 100.0, 60.0, 80.0
CYCLE_ITEMS, ROUND = 16, 4  # units of a step; of a rank in one round
FAST = 2.0


def cycle_job(*, steps):
    """sim <-> policy -> train, a gang of two on a pool twice as fast, which publishes to policy."""
    slots = {"cpu": "10m", "memory": "1000Mi"}
    return {
        "apiVersion": "rlinf.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "cycle"},
        "spec": {
            "seed": 1,
            "flow": {"name": "synthetic", "steps": steps, "config": {
                "workload": "cycle",
                "items": CYCLE_ITEMS,
                "edges": [{"from": "policy", "to": "train"},
                          {"from": "train", "to": "policy", "weights": True, "syncMs": EDGE_SYNC_MS}],
                "cycles": [{"roles": ["sim", "policy"], "roundTrips": TRIPS, "hopMs": HOP_MS, "stages": 1}],
                "speeds": {"fast": FAST},
                "channels": {"tickets": {"microBatch": 1, "depth": CYCLE_ITEMS},
                             "policy-train": {"microBatch": ROUND, "depth": 2}},
            }},
            "roles": [
                {"name": "sim", "kind": "synthetic", "config": {"time": {"perItemMs": 2.0, "perBatchMs": 10.0}}},
                {"name": "policy", "kind": "synthetic", "config": {"time": {"perItemMs": 1.0, "perBatchMs": 30.0}}},
                {"name": "train", "kind": "synthetic", "workers": 2, "config": {
                    "gang": True, "syncMs": GANG_SYNC_MS, "time": {"perItemMs": 20.0, "perBatchMs": 40.0}}},
            ],
            "pools": [
                {"name": "slow", "roles": ["sim", "policy"], "pods": 1, "slots": {"perPod": 2, **slots}},
                {"name": "fast", "roles": ["train"], "pods": 1, "slots": {"perPod": 2, **slots}},
            ],
        },
    }  # fmt: skip


@pytest.mark.timeout(60)
def test_a_cycle_its_hops_both_syncs_and_a_pools_speed_take_the_time_of_their_definition(tmp_path):
    """Each within 2%, but for hops: nobody makes up for a late one, so they are no shorter, and hardly longer."""
    steps, began = 5, bars.look()
    with Run(tmp_path, file=file_of(tmp_path, cycle_job(steps=steps)), small=False) as run:
        assert run.end() == 0, run.said
        spans = spans_of(run)
    there, back = of_role(spans, "sim", "compute"), of_role(spans, "policy", "compute")
    assert len(there) == len(back) == steps * TRIPS
    assert total_s(there) == bars.near(steps * TRIPS * (10.0 + 2.0 * CYCLE_ITEMS) / 1e3, rel=0.02, since=began)
    assert total_s(back) == bars.near(steps * TRIPS * (30.0 + 1.0 * CYCLE_ITEMS) / 1e3, rel=0.02, since=began)
    passages = sorted([*there, *back], key=lambda span: span["t0"])
    assert [span["role"] for span in passages] == ["sim", "policy"] * TRIPS * steps
    hops = [b["t0"] - a["t1"] for a, b in pairwise(passages) if a["step"] == b["step"]]
    assert len(hops) == steps * (2 * TRIPS - 1)
    hop_s = statistics.median(hops)
    assert 0.98 * HOP_MS / 1e3 <= hop_s <= bars.by_load(1.1 * HOP_MS / 1e3, since=began), sorted(hops)
    # A round: both ranks the same work, and two ranks' share of syncMs; all of it at the pool's speed.
    rounds, rank_s = steps * CYCLE_ITEMS // (2 * ROUND), (40.0 + 20.0 * ROUND) / FAST / 1e3
    computed = of_role(spans, "train", "compute")
    comms = of_role(spans, "train", "comm")
    synced = [found[0] for c in computed if (found := [s for s in comms if follows(c, s)])]
    published = [s for s in of_role(spans, "train", "weights") if s["step"] > 0]
    assert (len(computed), len(synced), len(published)) == (2 * rounds, 2 * rounds, 2 * steps)
    agree(
        (total_s(computed), 2 * rounds * rank_s),
        (total_s(synced), 2 * rounds * GANG_SYNC_MS / 2 / FAST / 1e3),
        (total_s(published), 2 * steps * EDGE_SYNC_MS / 1e3),
        since=began,
    )


def agree(*pairs, since):
    """(measured, defined) of the pieces of one lane: within 2% together. Where one is late the next is shorter, and may
    be of another kind: each within 10%."""
    measured, defined = map(sum, zip(*pairs, strict=True))
    assert measured == bars.near(defined, rel=0.02, since=since), pairs
    for measured, defined in pairs:
        assert measured == bars.near(defined, rel=0.1, since=since), pairs


def follows(before, after):
    """Of several the first is meant: a sync that makes up for a late wake-up takes no time, and the next meeting of the
    ranks begins right behind it."""
    return before["worker"] == after["worker"] and 0 <= after["t0"] - before["t1"] < 0.005


@pytest.mark.timeout(60)
def test_loads_and_offloads_take_the_time_of_their_definition(tmp_path):
    """Within 2%, at the pool's speed, on a slot without room for both."""
    steps, load_ms, offload_ms = 10, 120.0, 90.0
    entry = {
        "name": "turns", "items": 8, "edges": [{"from": "roll", "to": "train"}],
        "roles": [
            {"name": name, "service": "serial", "time": {"perItemMs": 4.0}, "loadMs": load_ms, "offloadMs": offload_ms,
             "memory": {"resident": 100, "peak": 200, "offloaded": 10}}
            for name in ("roll", "train")
        ],
        "pools": [{"name": "gpu", "slots": 1, "memory": 250, "roles": ["roll", "train"], "speed": FAST}],
    }  # fmt: skip
    manifest, began = workloads.job(entry, steps=steps, mode="Collocated"), bars.look()
    with Run(tmp_path, file=file_of(tmp_path, manifest), small=False) as run:
        assert run.end() == 0, run.said
        spans = spans_of(run)
    moves = []
    for kind, wanted_ms in (("load", load_ms), ("offload", offload_ms)):
        found = [s for role in ("roll", "train") for s in of_role(spans, role, kind) if s["t1"] - s["t0"] > 0.01]
        assert len(found) >= 2 * steps - 2, "the first load is the role's making itself"
        moves.append((total_s(found), len(found) * wanted_ms / FAST / 1e3))
    agree(*moves, since=began)


def cpu_s_of_grpc():
    """CPU time of a process that imports what no worker can do without."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import grpc.aio"], cwd=ROOT, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.timeout(120)
def test_a_worker_is_light(tmp_path):
    """No numpy and no torch in the process, 0.35 s of CPU until all are ready, and 45 MiB: pages that processes share,
    which are the libraries' and the rings', count by their share. On a slow CPU, five times what grpc alone takes:
    a worker takes twice that, and one with torch twenty times. Seconds: the row worker_start_synthetic."""
    manifest = workloads.job(workloads.entries()["drawn-00"], steps=1000, items=8)
    with Run(tmp_path, file=file_of(tmp_path, manifest), small=False) as run:
        run.until(lambda: any(line["event"] == "running" for line in run.lines("events")), what="all workers are ready")
        workers = [run.until(partial(run.part, name), what=name) for name in WORKERS_OF_DRAWN_00]
        cpu_s = sorted(sum(worker.cpu_times()[:2]) for worker in workers)
        run.until_step(1)
        for worker in workers:
            mapped = {m.path for m in worker.memory_maps()}
            assert not [path for path in mapped if "/numpy" in path or "/torch" in path or "libtorch" in path]
            assert [path for path in mapped if "grpc" in path], "the list of what is loaded was read"
            memory = worker.memory_full_info()
            assert memory.pss <= 45 * MIB, f"{memory.pss / MIB:.1f} MiB, {memory.rss / MIB:.1f} with all that is shared"
        assert cpu_s[len(cpu_s) // 2] <= max(0.35, 5 * statistics.median(cpu_s_of_grpc() for _ in range(3))), cpu_s
        run.interrupt()
        assert run.end() == 130


SIDE_BY_SIDE, TURNS, HYBRID = {"mode": "Disaggregated"}, {"mode": "Collocated"}, {"hybrid": True}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "placement"),
    [
        pytest.param("drawn-09", SIDE_BY_SIDE, id="a cycle with a role of two slots"),
        pytest.param("drawn-28", TURNS, id="two inputs and staleness in turns"),
        pytest.param("drawn-14", TURNS, id="a cycle in turns", marks=pytest.mark.slow("a further job in turns")),
        pytest.param("drawn-00", HYBRID, id="one beside two that take turns"),
    ],
)
def test_any_workload_runs_on_any_placement(tmp_path, name, placement):
    manifest, began = (
        workloads.job(workloads.entries()[name], steps=3, items=16, time_scale=0.8, **placement),
        bars.look(),
    )
    with Run(tmp_path, file=file_of(tmp_path, manifest), small=False) as run:
        assert run.end() == 0, run.said
    ran_well(run, placement, steps=3, since=began)


def ran_well(run, placement, *, steps, since):
    assert run.answer["steps"] == steps
    assert [line["units"] for line in run.lines("lineage")] == [16] * steps
    spans, turns = spans_of(run), timeline.read(run.work_dir).turns
    assert any(span["kind"] == "offload" for span in spans) is (placement is not SIDE_BY_SIDE)
    assert at_once(spans) == [], "a slot is one role's at a time"
    assert bool(turns) is (placement is not SIDE_BY_SIDE)
    for on_slot in turns.values():
        assert all(one.t1 <= other.t0 for one, other in pairwise(on_slot))
    idle_adds_up(run, steps=steps, since=since)
    for span in (s for s in spans if s["kind"] == "compute"):
        for slot in turns.keys() & span["slot"].split(","):
            its_own = [turn for turn in turns[slot] if turn.worker == span["worker"]]
            assert any(turn.t0 <= span["t0"] and span["t1"] <= turn.t1 for turn in its_own)


def idle_adds_up(run, *, steps, since):
    """The shares that the driver writes step by step are those of the spans, slot by slot and over the steps: but for
    work around the end of a step, which counts to the one in which its worker heard of that end."""
    lines = {line["step"]: line for line in run.lines("metrics")}
    told = {step: lines[step + 1]["previous"]["idle"] for step in range(1, steps)}
    lasted = {step: lines[step]["step_s"] for step in told}
    for step, shares in told.items():
        by_spans = timeline.idle_shares(timeline.read(run.work_dir, first=step, last=step))
        unsure = HEARD_LATE_S / lasted[step]
        assert shares == {slot: bars.near(share, abs=unsure, since=since) for slot, share in by_spans.items()}, step
    whole = timeline.idle_shares(timeline.read(run.work_dir, first=1, last=steps - 1))
    all_s = sum(lasted.values())
    for slot, share in whole.items():
        idle_s = sum(lasted[step] * shares[slot] for step, shares in told.items())
        assert idle_s / all_s == bars.near(share, abs=HEARD_LATE_S / all_s, since=since), slot


def at_once(spans):
    """Pairs of roles that computed on one slot at the same time."""
    by_slot = defaultdict(list)
    for span in spans:
        for slot in span["slot"].split(",") if span["kind"] == "compute" else ():
            by_slot[slot].append(span)
    found = []
    for on_slot in by_slot.values():
        on_slot.sort(key=lambda span: span["t0"])
        for number, span in enumerate(on_slot):
            for other in on_slot[number + 1 :]:
                if other["t0"] >= span["t1"]:
                    break
                if other["role"] != span["role"]:
                    found.append((span, other))
    return found


@pytest.mark.timeout(120)
def test_the_account_of_each_step_adds_up_and_recording_costs_little(tmp_path):
    """Of a workload with two inputs of one role, which runs as any other."""
    manifest, began = (
        workloads.job(workloads.entries()["drawn-15"], steps=4, items=16, mode="Disaggregated"),
        bars.look(),
    )
    with Run(tmp_path, file=file_of(tmp_path, manifest), small=False) as run:
        assert run.end() == 0, run.said
        lines = run.lines("metrics")
        assert (run.work_dir / "timeline.json").stat().st_size > 0
    ran_well(run, SIDE_BY_SIDE, steps=4, since=began)
    lasted = {line["step"]: line["step_s"] for line in lines}
    shares, cost = [], 0.0
    for line in lines[1:]:
        accounts = line["previous"]["account"]
        assert len(accounts) == 8
        for account in accounts.values():
            kinds = {k: v for k, v in account.items() if k not in ("window_s", "instrument_s")}
            assert sum(kinds.values()) == bars.near(lasted[line["step"] - 1], rel=0.01, since=began)
            shares.append(kinds.get("other", 0.0) / account["window_s"])
            cost += account["instrument_s"] / account["window_s"]
    other = sorted(shares)[len(shares) // 2]
    assert other < bars.by_load(0.05, since=began), "spans see nearly all of a worker's time"
    assert cost / len(shares) < bars.by_load(0.01, since=began)


@pytest.mark.long("starts 64 processes")
@pytest.mark.timeout(120)
def test_64_workers_are_ready_and_through_their_first_step_within_30_s(tmp_path):
    """On a quiet machine, of which the row workers_64_first_step says how many it takes."""
    began = bars.look()
    with Run(tmp_path, file=file_of(tmp_path, start.job(64)), small=False) as run:
        assert run.end(timeout_s=100.0) == 0, run.said
        assert run.lines("events")[-1]["message"] == "1 steps are done"
        assert run.answer["wall_s"] <= bars.by_load(30.0, since=began)


def test_examples_are_valid():
    from rljob import manifest as manifests

    for path in sorted((ROOT / "examples" / "synthetic").glob("*.yaml")):
        assert manifests.check(manifests.read(path)).problems == ()
