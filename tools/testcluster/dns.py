"""Asks a DNS server for an IPv4 address, without the machine's resolver. Used to see that the cluster's DNS answers."""

from __future__ import annotations

import secrets
import socket
import struct


def query(name: str, *, number: int) -> bytes:
    """The packet that asks for `name`'s A records."""
    header = struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 0)
    labels = b"".join(bytes([len(label)]) + label.encode("ascii") for label in name.rstrip(".").split("."))
    return header + labels + b"\0" + struct.pack(">HH", 1, 1)


def addresses(packet: bytes, *, number: int) -> list[str]:
    """The A records of an answer; empty when it is not the answer to `number`, or has none."""
    got, _, questions, answers, _, _ = struct.unpack(">HHHHHH", packet[:12])
    if got != number:
        return []
    at = 12
    for _ in range(questions):
        at = _after_name(packet, at) + 4
    found = []
    for _ in range(answers):
        at = _after_name(packet, at)
        kind, _, _, length = struct.unpack(">HHIH", packet[at : at + 10])
        at += 10
        if kind == 1 and length == 4:
            found.append(socket.inet_ntoa(packet[at : at + 4]))
        at += length
    return found


def _after_name(packet: bytes, at: int) -> int:
    while packet[at]:
        if packet[at] >= 0xC0:  # a pointer to a name that came earlier ends this one
            return at + 2
        at += packet[at] + 1
    return at + 1


def resolve(name: str, *, server: str, timeout_s: float = 0.5) -> list[str]:
    """Addresses of `name`; empty when the server says there is none or does not answer in time."""
    number = secrets.randbelow(1 << 16)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.settimeout(timeout_s)
        try:
            udp.sendto(query(name, number=number), (server, 53))
            packet, _ = udp.recvfrom(4096)
        except OSError:
            return []
    return addresses(packet, number=number)
