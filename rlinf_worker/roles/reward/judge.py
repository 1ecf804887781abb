"""The parent's end of child.py: asks it for the rewards of a group, within a deadline, and starts it anew.

For: the reward role. What comes of a function of the user's own: numbers, one for each text, each finite; anything else
is a NoRewards with its name, which the role counts. A child that hangs is killed; the next question starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlinf_api.errors import RLinfError, UserError

LINE_BYTES: Final = 64 << 20  # of what a child may answer at once
START_S: Final = 120.0  # imports of the function's module


class NoRewards(RLinfError):
    """A group has no rewards. `name`: raised, hung, died, not-finite, wrong-length; it is counted under it."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(what)
        self.name = name


class Judge:
    """One question at a time. `close` it."""

    def __init__(self, config: Mapping[str, Any], *, timeout_s: float) -> None:
        self._config, self._timeout_s = dict(config), timeout_s
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises UserError where the function cannot be loaded."""
        if self._child is not None:
            return
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rlinf_worker.roles.reward.child", stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, limit=LINE_BYTES,
        )  # fmt: skip
        self._child = child
        said = await self._exchange(self._config, timeout_s=START_S)
        if "failed" in said:
            await self.close()
            raise UserError(str(said["failed"]))

    async def rewards(self, texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, list[float]]:
        """Named parts. Raises NoRewards."""
        await self.start()
        said = await self._exchange({"texts": list(texts), "row": dict(row)}, timeout_s=self._timeout_s)
        if "error" in said:
            raise NoRewards("raised", f"the reward function raised {said['error']}")
        parts: dict[str, list[float]] = said["parts"]
        for name, part in parts.items():
            if len(part) != len(texts):
                what = f"the reward function answered {len(part)} numbers of {name!r} for {len(texts)} texts"
                raise NoRewards("wrong-length", what)
            if not all(math.isfinite(number) for number in part):
                raise NoRewards("not-finite", f"the reward function answered {name!r} {part[:8]}")
        if not parts:
            raise NoRewards("wrong-length", "the reward function answered no part")
        return parts

    async def _exchange(self, question: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                child.stdin.write(json.dumps(question).encode() + b"\n")
                await child.stdin.drain()
                line = await child.stdout.readline()
        except TimeoutError:
            await self.close()
            raise NoRewards("hung", f"the reward function did not answer within {timeout_s:g} s") from None
        except (OSError, ValueError) as error:  # it is gone, or said more than a line may have
            await self.close()
            raise NoRewards("died", f"the process of the reward function: {error}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        if not line:
            code = await child.wait()
            await self.close()
            raise NoRewards("died", f"the process of the reward function exited with {code}")
        return dict(json.loads(line))

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
