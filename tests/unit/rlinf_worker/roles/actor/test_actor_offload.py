"""The actor's parameters, gradients and optimizer state leave their slots between turns, and nobody notices."""

import asyncio
from typing import Any

import numpy as np

from rlinf_worker.algorithms.offloading import HostCopy
from rlinf_worker.roles.actor.learner import Learner
from rlinf_worker.roles.actor.role import FsdpRole
from rlinf_worker.roles.protocol import Offloadable
from tests.fakes.gang_rank import SPEC, config, samples_of


def actor() -> FsdpRole:
    role = FsdpRole()
    role._learner = Learner(SPEC, config())
    role.host = HostCopy(role._learner.tensors)
    return role


def shown(role: FsdpRole) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.array(array) for name, array in role._learner.shards().items() if isinstance(array, np.ndarray)}


def test_an_actor_that_has_built_nothing_has_nothing_to_move():
    role = FsdpRole()
    assert isinstance(role, Offloadable)
    asyncio.run(role.offload())
    asyncio.run(role.load())
    assert role.memory().now == 0


def test_an_actor_learns_the_same_whether_it_leaves_its_slots_between_steps_or_not():
    moved, stayed = actor(), actor()
    for step in (1, 2, 3):
        samples = [samples_of(24, seed=step, learner=role._learner) for role in (moved, stayed)]
        assert moved._learner.update(samples[0], step=step) == stayed._learner.update(samples[1], step=step)
        shards = shown(moved)
        had = moved.memory().now
        assert had >= 3 * sum(array.nbytes for array in shards.values()), "parameters and two moments"
        asyncio.run(moved.offload())
        assert moved.memory().now == 0, "nothing of it stays, though its weights were shown"
        asyncio.run(moved.load())
        assert moved.memory().now == had
        assert all(np.array_equal(shards[name], array) for name, array in shown(moved).items())
