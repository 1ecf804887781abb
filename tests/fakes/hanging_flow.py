"""Flow `synthetic`, which calls something in the driver of the job's first attempt that never answers."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from rlinf_api import names
from rlinf_worker.flows.protocol import Flow
from rlinf_worker.flows.synthetic import check_config, check_job, synthetic

__all__ = ["check_config", "check_job", "flow"]
HANGS_IN: Final = 3
"""The step before which it does so."""


class _Hanging:
    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flow, name)

    async def steps(self) -> AsyncIterator[Any]:
        async for step in self._flow.steps():
            if step.number == HANGS_IN and os.environ[names.ENV_ATTEMPT] == "1":
                time.sleep(600.0)  # noqa: ASYNC251 - this is what it is for; longer than any test waits
            yield step


async def flow(flow: Flow) -> None:
    await synthetic(_Hanging(flow))
