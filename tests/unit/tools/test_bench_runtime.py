"""What rows of `make bench-runtime` make of what they read: the same units in count and time, no figure of too little
load."""

import dataclasses
import time

import pytest

from rlinf_api.job import RLJobSpec
from rlinf_worker.flows.synthetic import check_config, check_job
from rljob.timeline import Record
from tools.bench import runtime
from tools.bench.harness import BenchError
from tools.bench.runtime_parts import fan, heard, hops, joined, recovery, scale, spans, thousands


def test_a_beat_is_missed_when_the_next_one_is_due_before_it_is_heard(tmp_path):
    tally = heard.Tally.of(tmp_path / "beats", new=True)
    now = time.monotonic_ns()
    tally.add(now)
    tally.add(now - 2 * heard.LATE_NS)
    assert list(heard.Tally.of(tmp_path / "beats").numbers) == [2, 1], "seen by whoever has the file"


def test_a_driver_that_had_less_to_hear_has_no_figures():
    offered = {"agents_beats": 1024.0, "agents_credits": 1024.0}
    scale.check_offered(offered, 1024)
    with pytest.raises(BenchError, match="900 beats a second were offered, wanted 1024 of 1024 agents"):
        scale.check_offered({**offered, "agents_beats": 900.0}, 1024)
    with pytest.raises(BenchError, match="900 credits a second were offered"):
        scale.check_offered({**offered, "agents_credits": 900.0}, 1024)


def test_a_crowd_comes_loses_one_and_changes_its_plan():
    """What did not happen has no figure: each part raises where the driver is not where it should be."""
    found = thousands.measure(2)
    assert set(found) == {row.name for row in thousands.rows()}
    assert all(value > 0 for value in found.values())
    crowd = thousands.Crowd(1)
    crowd.driver.on_worker_message = lambda *_, **__: None  # type: ignore[method-assign]
    with pytest.raises(BenchError, match="the job does not run"):
        crowd.come()


@pytest.mark.parametrize(("rounds", "order"), [(True, "arrival"), (True, "lineage"), (False, "arrival")])
def test_a_step_of_joined_units_ends_and_one_that_lacks_parts_has_no_figure(rounds, order):
    assert joined.measure(256, rounds=rounds, order=order) > 0
    with pytest.raises(BenchError, match="256 of 512 units were handed out"):
        joined.measure(256, rounds=rounds, order=order, scores=128)


def test_a_hop_is_a_role_that_a_unit_goes_through():
    assert hops.hops(hops.job(micro_batch=8)) == 3 * 1000
    assert hops.hops(hops.job(micro_batch=1, units=4, trips=250)) == 4 * (2 * 250 + 1), "and the queue behind the cycle"
    for wanted in (hops.job(micro_batch=8), hops.job(micro_batch=1, units=4, trips=250)):
        assert check_config(wanted["spec"]["flow"]["config"])
        assert list(check_job(RLJobSpec.model_validate(wanted["spec"]))) == []


def test_what_a_job_takes_that_does_not_get_to_its_end_is_no_figure():
    wanted = hops.job(micro_batch=8, units=1, steps=2)
    wanted["spec"]["roles"][0]["config"]["nonsense"] = 1
    with pytest.raises(BenchError, match=r"rljob run is at step 0, wanted 2 \(exit code 2\)"):
        hops.milliseconds(wanted)


def consumer(rank, *, taken, first_s, last_s, first_batch=10):
    told = {"taken": taken, "first_batch": first_batch, "first_ns": first_s * 1e9, "last_ns": last_s * 1e9}
    return {f"{name}_{rank}": float(value) for name, value in told.items()}


def test_consumers_that_work_one_after_the_other_are_not_twice_as_quick():
    after = {**consumer(0, taken=100, first_s=1, last_s=2), **consumer(1, taken=110, first_s=2, last_s=3)}
    assert fan.rate(after) == 100, "200 units after the first batch, in the 2 s from it to the last one of both"
    at_once = {**consumer(0, taken=100, first_s=1, last_s=2), **consumer(1, taken=110, first_s=1.5, last_s=2)}
    assert fan.rate(at_once) == 200
    alone = {**consumer(0, taken=0, first_s=0, last_s=0, first_batch=0), **consumer(1, taken=210, first_s=1, last_s=2)}
    assert fan.rate(alone) == 200, "one that took nothing has no clock to tell"


def test_the_cost_of_spans_has_the_agents_part_in_it():
    record = Record(accounted_s=10.0, instrument_s={"env/0": 0.02, "actor/0": 0.05}, agent_instrument_s=0.04)
    assert spans.shares(record) == pytest.approx({"spans_cost": 0.7, "spans_cost_agents": 0.4})
    replace = dataclasses.replace
    for untold in (
        replace(record, accounted_s=0.0), replace(record, instrument_s={}), replace(record, agent_instrument_s=0.0)
    ):  # fmt: skip
        with pytest.raises(BenchError, match="that is no measurement"):
            spans.shares(untold)


def test_every_bar_of_recovery_and_of_recording_has_its_row():
    bars = {row.name: row.bar for row in runtime.rows() if row.name.startswith(("recover_", "spans_"))}
    wanted: dict[str, float | None] = dict.fromkeys((f"recover_{part}" for part in recovery.PARTS), 3.0)
    wanted |= {"recover_driver_lost": None, "recover_spare": 5.0, "spans_cost": 1.0, "spans_cost_agents": None}
    assert bars == wanted


def test_what_others_lost_by_the_drivers_loss_is_a_figure(monkeypatch):
    lost = {"lost_driver": {"env": 1.5, "actor": 1.0}, "recover_driver": 0.5, "lost_env": {"actor": 9.0}}
    monkeypatch.setattr(recovery, "_recover", lambda: lost)
    assert recovery.recover() == {"recover_driver_lost": 2.5, "recover_driver": 0.5}
