"""What the driver put into units of its own. Called by queues.channel."""

from __future__ import annotations

import json
from typing import Any

from rlinf_api.errors import InvariantBroken
from rlinf_worker.queues.units import UnitInfo


def inline_payload(unit: UnitInfo) -> Any:
    """What the driver put into a unit of its own: JSON."""
    try:
        return json.loads(unit.inline or b"{}")
    except ValueError as error:
        raise InvariantBroken(f"unit {unit.key} of the driver is no JSON", got=repr(unit.inline[:80])) from error
