"""Messages on their way to one peer of the driver. Filled by the core, emptied by its stream (`uplink.serving`)."""

from __future__ import annotations

from typing import Any

from rlinf_worker.uplink.outbox import Outbox


class PeerOutbox(Outbox[Any]):
    deaf = False
    """Its peer has been dismissed and ends by its agent's word: what it still says counts no more."""
