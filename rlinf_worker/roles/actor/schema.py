"""spec.roles[].config of kind `fsdp`, as pydantic checks it before anything starts."""

from __future__ import annotations

from pydantic import StrictBool

from rlinf_api.job import Model


class FsdpConfig(Model):
    weights_delta: StrictBool = False
    """Whether an edition of the weights carries only blocks that changed. False: PPO changes every block, and finding
    that out costs a hash each."""
