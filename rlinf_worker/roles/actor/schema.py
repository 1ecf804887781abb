"""spec.roles[].config of kind `fsdp`, as pydantic checks it before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import StrictBool

from rlinf_api.job import Model
from rlinf_api.sentences import checked


class FsdpConfig(Model):
    weights_delta: StrictBool = False
    """Whether an edition of the weights carries only blocks that changed. False: PPO changes every block, and finding
    that out costs a hash each."""


def check(config: Mapping[str, Any], *, prefix: str) -> FsdpConfig:
    """InvalidManifest with a sentence per problem, each beginning with its field below `prefix`."""
    return checked(FsdpConfig, config, prefix=prefix)
