"""A loopback address for every pod, unique on the machine while the pod lives, and the check that its ports are free.

For: `pod_life.py`, a claim per pod. Not for: names (hosts.py).
All of 127.0.0.0/8 is local on Linux. A claim is a bound abstract unix socket named after the address: it exists once
per network name space, which is exactly where addresses are shared, needs no file that a crash would leave, is
closed on exec, and goes with the process that holds it. A TCP port would do the same and take one from the programs.
Addresses are not used again within a run until the range is through, so a message for a dead pod finds nobody.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable

from rlinf_api.errors import RetryableError

FIRST = ipaddress.IPv4Address("127.1.0.1")
LAST = ipaddress.IPv4Address("127.1.255.254")
MAX_TRIES = 64  # two runs that start together interleave; a port taken on every address is found after this many


class NoAddress(RetryableError):
    """No loopback address could be claimed, or the ports of the pod are taken on all that were tried."""


class Addresses:
    """Hands out claims in ascending order; one instance per backend."""

    def __init__(self) -> None:
        self._next = FIRST

    def claim(self, ports: Iterable[tuple[int, str]] = ()) -> tuple[str, socket.socket]:
        """An address, and what holds it until it is closed. `ports` are (number, TCP or UDP) as the pod declares them.

        >>> Addresses().claim([(7070, "TCP")])[0]  # doctest: +SKIP
        '127.1.0.1'
        """
        wanted, why = list(ports), ""
        for _ in range(MAX_TRIES):
            address = str(self._next)
            self._next = FIRST if self._next >= LAST else self._next + 1
            holder = _hold(address)
            if holder is None:
                continue
            why = next(filter(None, (port_problem(address, port, protocol=name) for port, name in wanted)), "")
            if not why:
                return address, holder
            holder.close()
        raise NoAddress(
            f"no address for the pod among {MAX_TRIES} of {FIRST} to {LAST}",
            got=why or "all claimed by other runs",
            wanted="an address with these ports free: "
            + (", ".join(f"{port}/{name}" for port, name in wanted) or "none"),
            next="stop the program that listens on every address (ss -ltnp shows it), or the other runs",
        )


def _hold(address: str) -> socket.socket | None:
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0rlinf-pod-address/{address}")
    except OSError as err:
        holder.close()
        if err.errno == errno.EADDRINUSE:
            return None
        raise NoAddress(f"claim of {address}", got=str(err), wanted="Linux with abstract unix sockets") from err
    return holder


def port_problem(address: str, port: int, *, protocol: str) -> str:
    """Empty: the port can be bound. SO_REUSEADDR, as servers set it: connections in TIME_WAIT do not count."""
    kind = socket.SOCK_DGRAM if protocol == "UDP" else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as probe:
        if kind == socket.SOCK_STREAM:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            if kind == socket.SOCK_STREAM:
                probe.listen(1)
        except OSError as err:
            return f"{address}:{port}/{protocol}: {err.strerror}"
    return ""
