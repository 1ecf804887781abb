"""What several files here begin with."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.pod import Pod


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Callable[..., Pod]]:
    """Makes pods, each with a real agent once it is started; all are stopped at the end."""
    made: list[Pod] = []

    def make(**options: Any) -> Pod:
        made.append(Pod(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        await each.stop()
