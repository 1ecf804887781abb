"""What the two ends of a new link agree on for buffers on a GPU, and the lane that comes of it.

For: `tcp` and `shm`, in their hellos. Not for: the lanes (`nccl`, `cuda`), nor the rules of choice (`devices.choose`).

    dialer    -- hello, "my GPU is ..." -->           listener    chooses
    dialer    <-- yes, "ipc", or "nccl" and ticket -- listener
    both      the lane: at once (ipc), or when both have built it, in the background (nccl)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlinf_worker.links import devices, nccl
from rlinf_worker.links.cuda import IpcLane
from rlinf_worker.links.devices import Gpu
from rlinf_worker.links.lane import LaneError
from rlinf_worker.links.link import Link

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Offer:
    """The listener's answer: what it says, and its own part of it."""

    extra: Mapping[str, Any]
    begin: Callable[[Link], None]


async def offer(extra: Mapping[str, Any], ours: Gpu | None, *, host: str, same_pod: bool, may_be_plain: bool) -> Offer:
    """For a dialer's hello with `extra`."""
    theirs = Gpu.from_hello(extra.get("gpu"))
    way = devices.choose(ours, theirs, same_pod=same_pod, may_be_plain=may_be_plain)
    if ours is None or theirs is None or way == "host":
        return Offer({}, lambda link: None)
    if way == IpcLane.kind:
        return Offer({"gpu": ours.to_dict(), "way": way}, lambda link: _ipc(link, ours))
    if (store := await nccl.open_store(host)) is None:
        return Offer({}, lambda link: None)
    make_store, ticket = nccl.listen(store)
    said = {"gpu": ours.to_dict(), "way": way, "ticket": ticket}
    return Offer(said, lambda link: _nccl(link, ours, theirs, rank=0, make_store=make_store, key=ticket["key"]))


def as_dialer(link: Link, ours: Gpu | None, extra: Mapping[str, Any], *, host: str) -> None:
    """The dialer's part, as the listener's yes says."""
    theirs, way, ticket = Gpu.from_hello(extra.get("gpu")), extra.get("way"), extra.get("ticket")
    if ours is None or theirs is None:
        return
    if way == IpcLane.kind:
        _ipc(link, ours)
    elif way == nccl.NcclLane.kind and isinstance(ticket, Mapping):
        try:
            make_store, key = nccl.come(host, ticket)
        except LaneError as err:
            logger.warning("no NCCL between two GPUs, all goes by way of the host", extra={"why": str(err)})
            return
        _nccl(link, ours, theirs, rank=1, make_store=make_store, key=key)


def _ipc(link: Link, ours: Gpu) -> None:
    beside = link.beside
    beside.expect()
    beside.have(IpcLane(ours, say=beside.say, on_room=beside.on_room, on_lost=beside.lost))


def _nccl(link: Link, ours: Gpu, theirs: Gpu, *, rank: int, make_store: Callable[[], Any], key: str) -> None:
    beside = link.beside

    def ready(groups: nccl.Groups | None) -> None:
        lane = None
        if groups is not None:
            lane = nccl.NcclLane(groups, say=beside.say, on_room=beside.on_room, on_lost=beside.lost)
        beside.have(lane)

    meeting = nccl.GroupsInMaking(ours, theirs, rank=rank, ready=ready)
    beside.expect(meeting.abandon)
    meeting.start(make_store, key)
