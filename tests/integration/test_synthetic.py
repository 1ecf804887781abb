"""Synthetic roles in a real run: they take the time that their numbers say, weigh little, and any workload runs."""

import json
from collections import defaultdict
from functools import partial

import pytest
import yaml

from rlinf_worker.channels import lineage
from rlinf_worker.roles.synthetic.figures import Figures
from tests.rljob_runs import ROOT, Run
from tools import workloads
from tools.bench.runtime_parts import start

MIB = 1 << 20
STEPS = 8
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
    """Within 2%, on whatever this machine is busy with: late wake-ups are made up for."""
    entry = json.loads(json.dumps(workloads.entries()["paper-ppo7b"]))
    for role in entry["roles"]:
        role["time"]["jitter"] = 0.0
        if role["service"] == "serial":
            role["time"]["perItemMs"] = 12.0  # seconds per worker: the last wake-up, which nothing follows, is late
    items = 64
    manifest = workloads.job(entry, steps=STEPS, items=items)
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
        wanted = of_items + pieces * figures.batch_s()
        assert seconds[role] == pytest.approx(wanted, rel=0.02), role


@pytest.mark.timeout(120)
def test_a_worker_is_light(tmp_path):
    """No numpy and no torch in the process, 0.35 s of CPU until all are ready, and 45 MiB: pages that processes share,
    which are the libraries' and the rings', count by their share."""
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
        assert cpu_s[len(cpu_s) // 2] <= 0.35, cpu_s
        run.interrupt()
        assert run.end() == 130


SIDE_BY_SIDE, TURNS, HYBRID = {"mode": "Disaggregated"}, {"mode": "Collocated"}, {"hybrid": True}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "placement"),
    [
        pytest.param("drawn-15", SIDE_BY_SIDE, id="two inputs of one role"),
        pytest.param("drawn-09", SIDE_BY_SIDE, id="a cycle with a role of two slots"),
        pytest.param("drawn-28", TURNS, id="two inputs and staleness in turns"),
        pytest.param("drawn-14", TURNS, id="a cycle in turns"),
        pytest.param("drawn-00", HYBRID, id="one beside two that take turns"),
    ],
)
def test_any_workload_runs_on_any_placement(tmp_path, name, placement):
    manifest = workloads.job(workloads.entries()[name], steps=3, items=16, time_scale=0.2, **placement)
    with Run(tmp_path, file=file_of(tmp_path, manifest), small=False) as run:
        assert run.end() == 0, run.said
        assert run.answer["steps"] == 3
        assert [line["units"] for line in run.lines("lineage")] == [16, 16, 16]
        spans = spans_of(run)
    assert any(span["kind"] == "offload" for span in spans) is (placement is not SIDE_BY_SIDE)
    assert at_once(spans) == [], "a slot is one role's at a time"


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
    manifest = workloads.job(workloads.entries()["drawn-15"], steps=6, items=32)
    with Run(tmp_path, file=file_of(tmp_path, manifest), small=False) as run:
        assert run.end() == 0, run.said
        lines = run.lines("metrics")
        assert (run.work_dir / "timeline.json").stat().st_size > 0
    lasted = {line["step"]: line["step_s"] for line in lines}
    shares, cost = [], 0.0
    for line in lines[1:]:
        accounts = line["previous"]["account"]
        assert len(accounts) == 8
        for account in accounts.values():
            kinds = {k: v for k, v in account.items() if k not in ("window_s", "instrument_s")}
            assert sum(kinds.values()) == pytest.approx(lasted[line["step"] - 1], rel=0.01)
            shares.append(kinds.get("other", 0.0) / account["window_s"])
            cost += account["instrument_s"] / account["window_s"]
    assert sorted(shares)[len(shares) // 2] < 0.05, "spans see nearly all of a worker's time"
    assert cost / len(shares) < 0.01


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_64_workers_are_ready_and_through_their_first_step_within_30_s(tmp_path):
    with Run(tmp_path, file=file_of(tmp_path, start.job(64)), small=False) as run:
        assert run.end() == 0, run.said
        assert run.lines("events")[-1]["message"] == "1 steps are done"
        assert run.answer["wall_s"] <= 30.0


def test_examples_are_valid():
    from rljob import manifest as manifests

    for path in sorted((ROOT / "examples" / "synthetic").glob("*.yaml")):
        assert list(manifests.check(manifests.read(path)).lines()) == []
