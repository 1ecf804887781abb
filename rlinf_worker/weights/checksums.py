"""The checksums of versions that this worker has seen: its own, what it was sent, what its peers say that they have.

For: channel, receiver and subscribers. No version is ever seen with two (InvariantBroken).
"""

from __future__ import annotations

import logging
from typing import Final

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.protocol import PolicyVersion

logger = logging.getLogger(__name__)

REMEMBERED: Final = 64  # of past versions; a version that comes back comes soon
OWN: Final = b""  # in the place of a view: what this rank itself publishes


class Checksums:
    """The checksum of each view of each version: one number, whoever says it."""

    def __init__(self) -> None:
        self._known: dict[tuple[PolicyVersion, bytes], int] = {}
        self.conflicts = 0

    def note(self, version: PolicyVersion, view: bytes, checksum: int) -> None:
        if (version, view) not in self._known and logger.isEnabledFor(logging.DEBUG):  # read by tools/chaos
            extra = {"weights_version": str(version), "view": view.hex()[:32], "checksum": f"{checksum:016x}"}
            logger.debug("weights seen", extra=extra)
        known = self._known.setdefault((version, view), checksum)
        if known != checksum:
            self.conflicts += 1
            raise InvariantBroken(
                f"weights {version} exist twice with different bytes", got=f"checksum {checksum:016x}",
                wanted=f"{known:016x}", next="a restored actor must publish on a new branch",
            )  # fmt: skip
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    def knows(self, version: PolicyVersion, view: bytes) -> bool:
        return (version, view) in self._known

    @property
    def highest_branch(self) -> int:
        return max((version.branch for version, _ in self._known), default=0)
