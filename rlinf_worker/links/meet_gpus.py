"""What the two ends of a new link agree on for buffers on a GPU, and the lane that comes of it.

For: `tcp` and `shm`, in their hellos. Not for: the lanes (`nccl`, `cuda`), nor the rules of choice (`devices.choose`).

    dialer    -- hello, "my GPU is ..." -->           listener    chooses
    dialer    <-- yes, "ipc", or "nccl" and ticket -- listener
    both      the lane: at once (ipc), or when both have built it, in the background (nccl)
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

from rlinf_worker.links import devices, nccl
from rlinf_worker.links.cuda import IpcLane
from rlinf_worker.links.devices import Gpu
from rlinf_worker.links.lane import LaneError
from rlinf_worker.links.link import Link
from rlinf_worker.links.settings import LinkSettings

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"


async def offer(
    extra: Mapping[str, Any], settings: LinkSettings, *, host: str, same_pod: bool, may_be_plain: bool
) -> tuple[Mapping[str, Any], Callable[[Link], None]]:
    """For a dialer's hello with `extra`: what the listener answers, and what it begins once the link is there."""
    ours, theirs = devices.of(settings), Gpu.from_hello(extra.get("gpu"))
    way = devices.choose(ours, theirs, same_pod=same_pod, may_be_plain=may_be_plain)
    said: dict[str, Any] = {"way": way}
    store: Any = None
    if way == nccl.NcclLane.kind:
        if (store := await nccl.open_store(host)) is None:
            said["way"] = "host"
        else:
            said["ticket"] = {"port": int(store.port), "key": secrets.token_hex(16)}

    def begin(link: Link) -> None:
        link.said_gpu = ours
        if ours is not None and said["way"] == IpcLane.kind:
            _ipc(link, ours)
        elif ours is not None and store is not None:
            _nccl(link, ours, rank=0, make_store=lambda: store, key=said["ticket"]["key"])

    return said, begin


def as_dialer(link: Link, ours: Gpu | None, extra: Mapping[str, Any], *, host: str) -> None:
    """The dialer's part, as the listener's yes says; `ours` is what its hello said."""
    link.said_gpu = ours
    way, ticket = extra.get("way"), extra.get("ticket")
    if ours is None:
        return
    if way == IpcLane.kind:
        _ipc(link, ours)
    elif way == nccl.NcclLane.kind and isinstance(ticket, Mapping):
        try:
            make_store, key = nccl.come(host, ticket)
        except LaneError as err:
            logger.warning("no NCCL between two GPUs, all goes by way of the host", extra={"why": str(err)})
            return
        _nccl(link, ours, rank=1, make_store=make_store, key=key)


def _ipc(link: Link, ours: Gpu) -> None:
    link.beside.expect()
    link.beside.have(IpcLane(ours, link.beside))


def _nccl(link: Link, ours: Gpu, *, rank: int, make_store: Callable[[], Any], key: str) -> None:
    beside = link.beside

    def ready(groups: nccl.Groups | None) -> None:
        beside.have(None if groups is None else nccl.NcclLane(groups, beside))

    meeting = nccl.GroupsInMaking(ours, rank=rank, make_store=make_store, key=key, ready=ready)
    beside.expect(meeting.abandon)
