"""Of which tickets a role may make units: those that it has in hand, where it can know of no others."""

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.channels.in_hand import TicketsInHand, takes_all_itself
from rlinf_worker.channels.protocol import FIRST_VERSION, Item, LineageKey


def item(*tickets: str) -> Item:
    return Item(
        channel="units", key=LineageKey("k"), payload=1, step=1, branch=0, source=WorkerId("env/0"),
        version=FIRST_VERSION, tickets=tickets,
    )  # fmt: skip


def test_a_ticket_is_in_hand_while_any_item_of_it_is():
    known = TicketsInHand()
    first, second, asked = item("p:1", "p:2"), item("p:1"), item()
    for one in (first, second, asked):
        known.take(one)
    known.end(first)
    assert ("p:1" in known, "p:2" in known, "k" in known, len(known)) == (True, False, False, 1)
    known.end(second)
    known.end(asked)
    assert len(known) == 0


def test_an_item_that_a_role_has_made_up_counts_for_nothing():
    known = TicketsInHand()
    known.end(item("p:1"))
    known.take(item("p:1"))
    assert "p:1" in known


def queue(producer: str, consumer: str, *, rounds: bool = False) -> pb.ChannelSpec:
    return pb.ChannelSpec(
        name=f"{producer}-{consumer}", mode="Queue", producer=producer, consumer=consumer, rounds=rounds
    )


def cycle(asker: str, answerer: str) -> pb.ChannelSpec:
    return pb.ChannelSpec(name=f"{asker}?{answerer}", mode="Cycle", producer=asker, consumer=answerer)


WEIGHTS = pb.ChannelSpec(name="weights", mode="Weights", producer="actor", consumer="env")
PPO = [queue("", "env"), queue("env", "actor", rounds=True), queue("env", ""), cycle("env", "rollout"), WEIGHTS]
RELAYED = [queue("", "desk"), queue("", "env"), cycle("env", "broker"), cycle("desk", "broker")]


@pytest.mark.parametrize(
    ("role", "channels", "known"),
    [
        pytest.param("env", PPO, True, id="who asks, of whom nobody else takes anything"),
        pytest.param("rollout", PPO, False, id="who answers, and is told of what the asker takes"),
        pytest.param("actor", PPO, False, id="a rank, whose others take as well"),
        pytest.param("env", PPO[1:], False, id="who takes from no queue"),
        pytest.param("env", [*PPO, queue("", "rollout")], False, id="whom an answer may tell of another's"),
        pytest.param("env", RELAYED, False, id="whom another may tell of another's"),
        pytest.param("env", [*RELAYED[:2], cycle("desk", "broker")], True, id="cycles of others"),
    ],
)
def test_which_role_can_know_of_no_tickets_but_its_own(role, channels, known):
    assert takes_all_itself(role, channels) is known
