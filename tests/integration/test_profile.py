"""The profile of a real run comes to the definitions of its workload, and the run's own scheduler takes it."""

import json
import urllib.request

import pytest
import yaml

from rlinf_api import names
from rlinf_api.profile import Profile
from tests.cluster import bars
from tests.integration.test_synthetic import cycle_job, file_of, spans_of
from tests.rljob_runs import Run
from tools import workloads

MIB = 1 << 20
STEPS, ITEMS = 6, 8
ITEM_S, BATCH_S, LOAD_S, OFFLOAD_S = 0.012, 0.006, 0.06, 0.04


def turns_job():
    """roll and train take turns on one slot."""
    entry = {
        "name": "turns", "items": ITEMS, "edges": [{"from": "roll", "to": "train"}],
        "roles": [
            {"name": name, "service": "serial", "time": {"perItemMs": 1e3 * ITEM_S, "perBatchMs": 1e3 * BATCH_S},
             "loadMs": 1e3 * LOAD_S, "offloadMs": 1e3 * OFFLOAD_S,
             "memory": {"resident": 100, "peak": 200, "offloaded": 10}}
            for name in ("roll", "train")
        ],
        "pools": [{"name": "gpu", "slots": 1, "memory": 250, "roles": ["roll", "train"]}],  # no room for both
    }  # fmt: skip
    return workloads.job(entry, steps=STEPS, mode="Collocated")


def role(profile, name):
    [found] = [role for role in profile.roles if role.name == name]
    return found


def told(run, job):
    """Reports of the driver by what became of them."""
    pod = yaml.safe_load((run.work_dir / "objects" / f"pod-default-{job}-driver-a1.yaml").read_text())
    page = urllib.request.urlopen(f"http://{pod['status']['podIP']}:{names.PORT_METRICS}/metrics", timeout=30).read()
    lines = [line for line in page.decode().splitlines() if line.startswith("rlinf_driver_profiles_total")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def near(number, seconds, *, since):
    """A piece that began late is made up for by shorter ones, by less than what any part of a sum comes to; and a
    process that waits for a core is late. Twice: what a mistake in a sum comes to."""
    return 0.8 * seconds <= number <= bars.by_load(1.9 * seconds, since=since)


@pytest.mark.timeout(60)
def test_times_moves_memory_releases_and_waits_are_those_of_the_definition(tmp_path):
    began = bars.look()
    with Run(tmp_path, file=file_of(tmp_path, turns_job()), small=False) as run:
        run.until_step(1)
        run.until(lambda: told(run, "turns").get("accepted", 0) >= 2, what="two profiles were accepted")
        assert sum(count for outcome, count in told(run, "turns").items() if outcome != "accepted") == 0
        assert run.end() == 0, run.said
        profile, spans = Profile.from_json((run.work_dir / "profile.json").read_text()), spans_of(run)
        lasted = {line["step"]: line["step_s"] for line in run.lines("metrics")}
    assert (profile.revision, profile.first_step, profile.last_step, profile.steps) == (1, 2, STEPS, STEPS - 1)
    steps, roll, train = profile.steps, role(profile, "roll"), role(profile, "train")
    assert profile.step_seconds.value == pytest.approx(sum(lasted[n] for n in range(2, STEPS + 1)) / steps, rel=1e-4)
    for of in (roll, train):
        units = sum(batch.units * batch.seconds.count for batch in of.batches)
        assert units == steps * ITEMS
        worked = sum(batch.seconds.value * batch.seconds.count for batch in of.batches)
        batches = sum(batch.seconds.count for batch in of.batches)
        assert near(worked, units * ITEM_S + batches * BATCH_S, since=began), of.batches
        assert near(of.seconds["compute"].value, worked / steps, since=began)
        moves = {move.what: move for move in of.moves if move.what != "publish"}
        assert near(moves["load"].seconds.value, LOAD_S, since=began)
        assert near(moves["offload"].seconds.value, OFFLOAD_S, since=began)
        assert moves["load"].bytes == moves["offload"].bytes == 90 * MIB
        assert (of.memory.resident, of.memory.peak, of.memory.offloaded) == (100 * MIB, 200 * MIB, 10 * MIB)
        assert 10 * MIB < of.memory.process <= of.memory.process_peak < 500 * MIB
        waits = sum(end.wait_seconds.value for end in of.ends)
        assert waits == pytest.approx(of.seconds["wait_data"].value, rel=0.01)
    [releases] = roll.releases
    batches_a_step = sum(batch.seconds.count for batch in roll.batches) / steps
    assert (releases.channel, releases.count) == ("roll-train", steps * ITEMS)
    # One piece, no sum: on a machine that wakes late it is shorter by all that the one before it was too long.
    slower = bars.by_load(1.0, since=began)
    assert 0.8 / slower <= releases.seconds[0] / (BATCH_S + ITEM_S) <= 1.9 * slower
    assert near(releases.seconds[-1], batches_a_step * BATCH_S + ITEMS * ITEM_S, since=began)
    edges = {(c.name, c.producer, c.consumer): c.units.value for c in profile.channels}
    assert edges == {("tickets", "", "roll"): ITEMS, ("roll-train", "roll", "train"): ITEMS}
    assert {span["channel"] for span in spans if "channel" in span} == {"tickets", "roll-train"}
    assert sum(span["units"] for span in spans if span.get("units") and span["role"] == "roll") == STEPS * ITEMS


@pytest.mark.timeout(60)
def test_a_cycle_is_two_edges_and_waits_name_what_came(tmp_path):
    steps, began = 4, bars.look()
    with Run(tmp_path, file=file_of(tmp_path, cycle_job(steps=steps)), small=False) as run:
        assert run.end() == 0, run.said
        text = (run.work_dir / "profile.json").read_text()
    profile = Profile.from_json(text)
    edges = {(c.mode, c.producer, c.consumer): c.units.value for c in profile.channels}
    # A version that is pulled when the last step has ended is in no step, or in the next one.
    assert 0 < edges.pop(("Weights", "train", "policy")) <= 4 / 3
    assert edges == {
        ("Queue", "", "sim"): 16, ("Queue", "policy", "train"): 16, ("Cycle", "sim", "policy"): 2,
        ("Cycle", "policy", "sim"): 2,
    }  # fmt: skip
    sim, policy, train = (role(profile, name) for name in ("sim", "policy", "train"))
    waits = {(r.name, end.channel, end.side): end.wait_seconds.value for r in profile.roles for end in r.ends}
    # policy waits while a sub-batch is at sim or under way; sim waits for tickets while a step is learnt from.
    assert waits["sim", "tickets", "consumer"] > 0.1
    assert waits["policy", "cycle-sim-policy", "consumer"] > 0.1
    assert waits["train", "policy-train", "consumer"] > 0.3
    assert train.workers == 2
    exchanged, published, started = train.moves
    assert (exchanged.what, exchanged.seconds.count) == ("exchange", profile.steps)
    assert 0 < exchanged.seconds.value <= train.seconds["comm"].value + 1e-9, "of the rank that waited least"
    assert (started.what, started.seconds.count) == ("start", 2)
    assert 0.01 < started.seconds.value < 60
    assert (published.what, published.seconds.count) == ("publish", 2 * profile.steps)
    assert near(published.seconds.value, 0.058, since=began)
    assert [batch.size for batch in sim.batches] == [batch.size for batch in policy.batches] == [16]
    assert {found["pool"] for found in json.loads(text)["roles"]} == {"slow", "fast"}
