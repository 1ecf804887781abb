"""Idle share of each slot in a step, from what its workers say with their accounts."""

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.plan import PlacedWorker
from rlinf_api.slots import Slot
from rlinf_worker.driver import idle
from rlinf_worker.driver.idle import Busy


def placed(name, *indices):
    role, _, rank = name.partition("/")
    slots = tuple(Slot(pool="cpu", ordinal=0, index=index) for index in indices)
    return PlacedWorker(id=WorkerId(name), role=role, rank=int(rank), world=1, slots=slots)


def busy(*stretches, window_s=10.0):
    account = pb.Account(
        window_s=window_s, busy_s=sum(t1 - t0 for t0, t1 in stretches), busy=[at for pair in stretches for at in pair]
    )
    found = Busy.of(account)
    assert found is not None
    return found


def test_a_worker_makes_all_of_its_slots_busy():
    found = idle.shares([placed("env/0", 0, 1)], {WorkerId("env/0"): busy((0.0, 2.0), (4.0, 5.0))})
    assert found == {"cpu/0/0": 0.7, "cpu/0/1": 0.7}


def test_a_moment_in_which_two_of_a_slot_work_counts_once():
    workers = [placed("env/0", 0), placed("train/0", 0)]
    said = {WorkerId("env/0"): busy((0.0, 4.0)), WorkerId("train/0"): busy((3.0, 6.0), (9.0, 10.0))}
    assert idle.shares(workers, said) == {"cpu/0/0": pytest.approx(0.3)}


def test_the_step_ends_for_all_at_once_and_one_that_began_late_was_not_there_before():
    workers = [placed("env/0", 0), placed("train/0", 0)]
    said = {WorkerId("env/0"): busy((0.0, 4.0)), WorkerId("train/0"): busy((0.0, 1.0), window_s=2.0)}
    assert idle.shares(workers, said) == {"cpu/0/0": pytest.approx(0.5)}


def test_nothing_is_said_of_a_slot_whose_workers_have_said_nothing():
    assert idle.shares([placed("env/0", 0), placed("train/0", 1)], {WorkerId("env/0"): busy()}) == {"cpu/0/0": 1.0}


def test_of_a_worker_that_does_not_say_when_it_was_busy_nothing_is_made_up():
    assert Busy.of(pb.Account(window_s=1.0, seconds={"compute": 0.5, "wait_data": 0.5})) is None


def test_of_many_slots_the_means_of_their_pools_are_written():
    workers = [placed(f"env/{n}", n) for n in range(66)]
    said = {w.id: busy((0.0, 5.0 if w.rank % 2 else 10.0)) for w in workers}
    assert idle.shares(workers, said) == {"cpu": 0.25}
