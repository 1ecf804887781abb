"""spec.roles[].config of kind `gymnasium`: there is nothing to say, as the flow's config names the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf_api.job import Model
from rlinf_api.sentences import checked


class GymnasiumConfig(Model):
    """No field yet."""


def check(config: Mapping[str, Any], *, prefix: str) -> GymnasiumConfig:
    """InvalidManifest with a sentence per problem, each beginning with its field below `prefix`."""
    return checked(GymnasiumConfig, config, prefix=prefix)
