"""Name to address: the hosts file of the pod contract first (local mode), then the system's resolver.

Called by whoever dials: driver, agents, workers, the operator's clients. Not a cache: a replaced pod keeps its name and
changes its address, so every dial asks again.
"""

from __future__ import annotations

import asyncio
import os
import socket

from rlinf_api import names
from rlinf_api.errors import WorkerUnreachable

RESOLVE_TIMEOUT_S = 5.0  # cluster DNS answers in milliseconds; a dead one must not eat a dial's whole deadline


def from_file(host: str, path: str) -> str | None:
    """The address that a hosts(5) file gives for a name; None where the file or the name is missing."""
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                fields = line.split("#", 1)[0].split()
                if host in fields[1:]:
                    return fields[0]
    except FileNotFoundError:
        return None
    return None


async def resolve(host: str) -> str:
    """An IPv4 address. Raises WorkerUnreachable: a name appears only once its pod has an address."""
    path = os.environ.get(names.ENV_HOSTS_FILE, "")
    if path and (found := from_file(host, path)):
        return found
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            infos = await loop.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        raise WorkerUnreachable(
            f"no address for {host!r}", got=str(error) or "no answer", next="wait for its pod"
        ) from error
    return str(infos[0][4][0])


def split_address(address: str) -> tuple[str, int]:
    """('driver.math.team.svc', 7070) of 'driver.math.team.svc:7070'."""
    host, _, port = address.rpartition(":")
    return host, int(port)
