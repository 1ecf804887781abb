"""Which accelerators a worker may see: those of its slots. Slot 0 of a pod is the first of its devices, by UUID.

    pool: slots: {resource: nvidia.com/gpu}  ──►  the agent asks nvidia-smi  ──►  RLINF_DEVICES=GPU-1a..,GPU-2b..
                                                          a worker on slot 1  ──►  CUDA_VISIBLE_DEVICES=GPU-2b..

For: agent.main, which finds them; agent.spawning and runtime.spare, which give a worker its own. Not for: whose turn it
is on a slot (turns), and the devices of payloads (links.devices).
"""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rlinf_api import names
from rlinf_api.errors import UserError

logger = logging.getLogger(__name__)

NVIDIA: Final = "nvidia.com/"
SHARED: Final = ".shared"  # what NVIDIA's device plugin calls a GPU that it gives to several
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
GIVEN: Final = (VISIBLE, "NVIDIA_VISIBLE_DEVICES")
"""Where a person, or the node's container runtime, may have named them."""
ASK_S: Final = 30.0  # for nvidia-smi: 1 to 3 s without persistence mode, more where many GPUs wake up
_UUID: Final = re.compile(r"\(UUID:\s*((?:GPU|MIG)-[^)\s]+)\)")


def find(
    resource: str, *, slots: int, environ: Mapping[str, str], ask: Callable[[], str] | None = None
) -> tuple[str, ...]:
    """A UUID for each slot of this pod, or a number where nobody knows any; none where its slots are no GPUs of NVIDIA.
    Raises UserError where there are too few. `ask`: what `nvidia-smi -L` prints."""
    if not resource.startswith(NVIDIA):
        return ()
    named, where = _named(environ)
    if not named:
        try:
            named, where = _listed((ask or _ask)(), is_mig="mig" in resource), "nvidia-smi -L"
        except FileNotFoundError:  # an image for computing alone; a pod sees its own devices, and CUDA counts them
            logger.warning("no nvidia-smi here: the devices of slots go by number", extra={"slots": slots})
            return () if resource.endswith(SHARED) else tuple(map(str, range(slots)))
    if named and resource.endswith(SHARED):
        return tuple(named[slot % len(named)] for slot in range(slots))
    if len(named) < slots:
        raise UserError(
            f"this pod has {slots} slots of {resource}, and not as many devices",
            got=f"{', '.join(named) or 'none'}, by {where}", wanted=f"{slots}, one for each slot",
            next="look at the node's device plugin, or at the variable; where several share one, the resource's name "
            f"ends with {SHARED}",
        )  # fmt: skip
    return tuple(named[:slots])


def environ_of(devices: Sequence[str], slots: Sequence[int]) -> dict[str, str]:
    """What a worker on these slots has of it. Of none, nothing: it may be told where to go by its pod.

    >>> environ_of(["GPU-1a", "GPU-2b"], [1])
    {'CUDA_VISIBLE_DEVICES': 'GPU-2b'}
    """
    own = list(dict.fromkeys(devices[slot] for slot in slots)) if devices else []
    return {VISIBLE: ",".join(own)} if own else {}


def of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """As the agent has found them."""
    return tuple(filter(None, environ.get(names.ENV_DEVICES, "").split(",")))


def _named(environ: Mapping[str, str]) -> tuple[list[str], str]:
    """UUIDs, and the variable that has them. Numbers, `all` and `void` are no names."""
    for variable in GIVEN:
        found = [part.strip() for part in environ.get(variable, "").split(",")]
        if found and all(part.startswith(("GPU-", "MIG-")) for part in found):
            return found, variable
    return [], ""


def _listed(text: str, *, is_mig: bool) -> list[str]:
    """A GPU that is cut has its parts below it, and is none itself."""
    found = _UUID.findall(text)
    parts = [uuid for uuid in found if uuid.startswith("MIG-")]
    return parts if is_mig or parts else found


def _ask() -> str:
    try:
        return subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=ASK_S, check=True, stdin=subprocess.DEVNULL
        ).stdout
    except FileNotFoundError:
        raise
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or getattr(error, "stdout", "") or ""
        raise UserError(
            "the devices of this pod are not known: nvidia-smi -L failed",
            got=" ".join(filter(None, [str(error), str(said).strip()[:300]])), wanted="a line for each",
            next=f"look at the node's driver, or name the devices in {GIVEN[1]}",
        ) from error  # fmt: skip
