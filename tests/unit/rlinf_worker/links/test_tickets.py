"""How the second connection is let in: tickets that are none, ports that are none, and what may be registered."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections import Counter

import pytest

from rlinf_api.errors import InvariantBroken
from rlinf_worker.links import door, payload
from rlinf_worker.links.door import ENTERED, Door, come_in
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.links.settings import LinkSettings


async def test_a_ticket_has_a_port_a_number_of_its_own_and_a_secret_of_its_own():
    the_door = Door("127.0.0.1", settings=LinkSettings(), refused=Counter())
    first, second = the_door.ticket(lambda sock: None), the_door.ticket(lambda sock: None)
    assert first is not None
    assert second is not None
    assert (first["number"], second["number"], first["port"] == second["port"]) == (1, 2, True)
    assert (len(first["secret"]), len(second["secret"]), first["secret"] != second["secret"]) == (32, 32, True)
    await the_door.close()
    await the_door.close()
    assert await come_in("127.0.0.1", first) is None


async def test_a_host_that_is_not_of_this_machine_has_no_door_and_says_so(caplog):
    the_door = Door("192.0.2.1", settings=LinkSettings(), refused=Counter())
    assert the_door.ticket(lambda sock: None) is None
    (record,) = caplog.records
    assert (record.message, record.__dict__["host"]) == ("no port for bulk data, all goes over TLS", "192.0.2.1")
    await the_door.close()


@pytest.mark.parametrize(
    "ticket",
    [
        {}, {"port": 1, "number": 1}, {"port": "x", "number": 1, "secret": b""},
        {"port": 1 << 20, "number": 1, "secret": b""}, {"port": 1, "number": -1, "secret": b""},
        {"port": 1, "number": 1, "secret": 5},
    ],
)  # fmt: skip
async def test_what_is_no_ticket_is_a_word_in_the_log_and_no_lane(caplog, ticket):
    assert await come_in("127.0.0.1", ticket) is None
    (record,) = caplog.records
    assert record.message == "no bulk connection, all goes over TLS"
    assert record.__dict__["why"]


@pytest.mark.parametrize("answer", [b"\x00", b""])
async def test_a_door_that_answers_otherwise_gives_no_lane(caplog, answer):
    shown: list[bytes] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown.append(await reader.readexactly(40))
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, family=socket.AF_INET)
    port = server.sockets[0].getsockname()[1]
    assert await come_in("127.0.0.1", {"port": port, "number": 258, "secret": b"s" * 32}) is None
    assert shown == [b"\x02\x01" + bytes(6) + b"s" * 32]
    assert caplog.records[0].__dict__["why"] == ("the peer took no ticket" if answer else "it hung up")
    server.close()


async def test_as_many_as_may_have_tickets_may_stand_at_the_door(monkeypatch):
    monkeypatch.setattr(door, "MAX_TICKETS", 1)
    refused = Counter[str]()
    the_door = Door("127.0.0.1", settings=LinkSettings(), refused=refused)
    entered: list[socket.socket] = []
    ticket = the_door.ticket(entered.append)
    assert ticket is not None
    inside = await come_in("127.0.0.1", ticket)
    assert inside is not None
    async with asyncio.timeout(5):
        while not entered:
            await asyncio.sleep(0)
    assert the_door.ticket(entered.append) is not None, "the first one's is used up"
    assert (ENTERED, refused) == (b"\x01", {})
    inside.close()
    entered[0].close()
    await the_door.close()


def test_what_can_be_registered_is_a_dataclass_that_can_be_made_of_its_fields():
    class Plain:
        pass

    with pytest.raises(InvariantBroken, match=r"cannot register .*Plain: got <class 'type'>, wanted a dataclass"):
        payload.register(Plain)

    @dataclasses.dataclass
    class Hidden:
        shown: int
        kept: int = dataclasses.field(default=0, init=False)

    with pytest.raises(InvariantBroken, match=r"cannot register .*Hidden: got fields with init=False: \['kept'\]"):
        payload.register(Hidden)


def test_nesting_is_accepted_to_the_bound():
    def nested(levels: int) -> object:
        value: object = 1
        for _ in range(levels):
            value = [value]
        return value

    header, _ = payload.encode(nested(payload.MAX_DEPTH + 1))
    assert payload.decode(header, []) == nested(payload.MAX_DEPTH + 1)
    with pytest.raises(PayloadError, match="more than 64 levels"):
        payload.encode([nested(payload.MAX_DEPTH + 1), {}])
