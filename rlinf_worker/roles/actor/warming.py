"""What a process pays once: the first optimizer and the first update cost 2 s of CPU that later ones do not.

Called by the actor role in a warm spare. The learner that is made here is thrown away: it is as small as one can be,
and knows nothing of the job but its algorithm.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from rlinf_worker.algorithms.policy_spec import DiscreteActions, PolicySpec
from rlinf_worker.roles.actor.batch import Samples
from rlinf_worker.roles.actor.learner import Learner, LearnerConfig

SMALLEST: Final = PolicySpec(obs_shape=(1,), actions=DiscreteActions(count=2), hidden_sizes=(1,))


def warm(config: LearnerConfig) -> None:
    once = dataclasses.replace(config, epochs=1, final_epochs=None, minibatches=1)
    learner = Learner(SMALLEST, once)
    nothing = np.zeros(2, np.float32)
    samples = Samples(
        obs=np.zeros((2, 1), np.float32),
        action=np.zeros(2, np.int64),
        logprob=nothing,
        value=nothing,
        advantage=nothing,
        returns=nothing,
        episode_returns=np.zeros(0, np.float32),
        episode_lengths=np.zeros(0, np.int64),
    )
    learner.update(samples, step=1)
    learner.restore(*learner.state())
