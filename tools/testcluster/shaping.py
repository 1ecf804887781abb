"""Slows a machine's packets to others: a rate (htb), and a delay where the kernel has netem. `Faults.slow` calls this.

A machine has one class and one set of filters per other machine, so each pair has a rate and a delay of its own:

    1:            all that leaves eth0
    1:10          what is not slowed
    1:100 + n     to the machine of number n and its pods, chosen by filters of priority 100 + n; netem below it

All of it is in the kernel, nothing in this process: a second call, also of another process, finds what the first made.
"""

from __future__ import annotations

from collections.abc import Sequence

from tools.testcluster.errors import CommandFailed, MissingRequirement
from tools.testcluster.machine import Machine

_DEVICE = "eth0"
_FIRST = 0x100


def limit(machine: Machine, ranges: Sequence[str], *, number: int, rate_kbit: int, delay_ms: int) -> None:
    """Limits packets to `ranges`, the addresses of machine `number`; replaces what was said of it before."""
    _require_netem(machine, delay_ms)
    classes = machine.run(["tc", "class", "show", "dev", _DEVICE])
    words = commands(classes, ranges, number=number, rate_kbit=rate_kbit, delay_ms=delay_ms)
    machine.run(["tc", "-batch", "-"], stdin="\n".join(words) + "\n")


def lift(machine: Machine) -> None:
    """Takes all limits away."""
    if "htb" in machine.run(["tc", "qdisc", "show", "dev", _DEVICE]):
        machine.run(["tc", "qdisc", "del", "dev", _DEVICE, "root"])


def commands(classes: str, ranges: Sequence[str], *, number: int, rate_kbit: int, delay_ms: int) -> list[str]:
    """Lines for `tc -batch`; `classes` is what `tc class show` says.

    >>> commands("class htb 1:10 root ...", ["10.64.0.11/32"], number=1, rate_kbit=500, delay_ms=0)
    ... # doctest: +NORMALIZE_WHITESPACE
    ['class add dev eth0 parent 1: classid 1:101 htb rate 500kbit quantum 1500',
     'filter add dev eth0 parent 1: protocol ip prio 101 u32 match ip dst 10.64.0.11/32 flowid 1:101']
    """
    own, priority = f"1:{_FIRST + number:x}", 100 + number
    found = {line.split()[2] for line in classes.splitlines() if line.startswith("class htb")}
    words = []
    if "1:10" not in found:
        # The kernel refuses to replace an htb by an htb, so what is there stays.
        words += [
            f"qdisc add dev {_DEVICE} root handle 1: htb default 10",
            f"class add dev {_DEVICE} parent 1: classid 1:10 htb rate 10gbit quantum 60000",
        ]
    if own in found:
        words += [
            f"filter del dev {_DEVICE} parent 1: protocol ip prio {priority}",
            f"class del dev {_DEVICE} classid {own}",
        ]
    words.append(f"class add dev {_DEVICE} parent 1: classid {own} htb rate {rate_kbit}kbit quantum 1500")
    if delay_ms:
        words.append(f"qdisc add dev {_DEVICE} parent {own} netem delay {delay_ms}ms limit 10000")
    words += [
        f"filter add dev {_DEVICE} parent 1: protocol ip prio {priority} u32 match ip dst {target} flowid {own}"
        for target in ranges
    ]
    return words


def _require_netem(machine: Machine, delay_ms: int) -> None:
    if not delay_ms:
        return
    try:
        machine.run(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "0ms"])
        machine.run(["tc", "qdisc", "del", "dev", "lo", "root"])
    except CommandFailed as err:
        raise MissingRequirement(
            f"a delay of {delay_ms} ms needs the kernel's netem queue (CONFIG_NET_SCH_NETEM), which is not here; "
            "use slow(rate_kbit=...) or cut()"
        ) from err
