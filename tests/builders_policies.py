"""Weights of a small policy as rollouts get them."""

import numpy as np
from numpy.typing import NDArray

from rlinf_worker.algorithms.policies import ActorCritic


def weights_of(model: ActorCritic) -> dict[str, NDArray[np.float32]]:
    """The parameters that `PolicySpec.policy_parameters` names, as copies."""
    parameters = dict(model.named_parameters())
    return {name: parameters[name].detach().numpy().copy() for name in model.spec.policy_parameters()}
