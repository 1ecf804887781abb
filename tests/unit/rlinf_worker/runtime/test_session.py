"""What a worker and its driver agree on: each word of the driver reaches the part that it is for, twice and late ones
among them; and what the worker says of itself to each driver."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import DeadlineExceeded, InvariantBroken, UserError
from rlinf_api.names import WorkerId
from rlinf_api.slots import Allotment
from rlinf_worker.channels import messages, plain
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import ChannelClosed, PolicyVersion
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.checkpoints.store import KEEP
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.roles.protocol import FlowSettings
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.session import Facts, WorkerSession
from rlinf_worker.spans import Recorder

FLOW = FlowSettings(name="ppo", steps=3, seed=1, max_staleness=0, order="arrival", config={})
ME = Endpoint(worker="env/1", attempt=2, pod_uid="p", unix_path="/x", host="10.0.0.1", port=7, pool="sim")
THERE = Endpoint(worker="rollout/0", attempt=3, host="10.0.0.2", port=8)
QUESTIONS = pb.ChannelSpec(name="questions", mode="Cycle", producer="env", consumer="rollout", depth=8, stages=2)
CALLS = pb.ChannelSpec(name="calls", mode="Cycle", producer="actor", consumer="env", depth=8)
SEGMENTS = pb.ChannelSpec(
    name="segments", mode="Queue", producer="env", consumer="actor", micro_batch=1, depth=2, capacity_units=9,
    capacity_bytes=99,
)  # fmt: skip
TASKS = pb.ChannelSpec(name="tasks", mode="Queue", producer="driver", consumer="env", micro_batch=1, depth=2)
OTHERS = pb.ChannelSpec(name="others", mode="Queue", producer="rollout", consumer="actor", micro_batch=1, depth=2)
WEIGHTS = pb.ChannelSpec(name="weights", mode="Weights", producer="actor", consumer="env")


class Site:
    """A worker's session; the test is its driver and its links."""

    def __init__(self, **identity: Any) -> None:
        self.told = list[pb.WorkerMessage]()
        self.links: Any = Mock(handlers={}, on_up=[], on_unreachable=[], on_superseded=[], has_begun=False)
        self.links.listener = SimpleNamespace(endpoint=ME)
        self.driver: Any = Mock()
        given: dict[str, Any] = {
            "worker": WorkerId("env/1"), "role": "env", "kind": "fake", "rank": 1, "world": 2, "attempt": 2,
            "job_uid": "j", "shm_dir": "/dev/shm",
        }  # fmt: skip
        self.host = Host(
            worker="env/1",
            role="env",
            peers=self.links,
            waits=Waits(),
            recorder=Recorder(),
            tell=self.told.append,
            mark=lambda source, *, can_wait=False: None,
            finish_item=lambda item: None,
            fatal=lambda error: None,
        )
        self.session = WorkerSession(WorkerIdentity(**(given | identity)), self.host, driver=lambda: self.driver)

    def welcome(self, *, is_new_driver: bool = True, **fields: Any) -> None:
        known: dict[str, Any] = {
            "driver_attempt": 1, "channels": [QUESTIONS, CALLS, SEGMENTS, TASKS, OTHERS, WEIGHTS],
            "flow_json": FLOW.to_json(),
        }  # fmt: skip
        self.session.on_welcome(pb.Welcome(**(known | fields)), is_new_driver=is_new_driver)

    def hear(self, **kind: Any) -> None:
        self.session.on_message(pb.DriverMessage(**kind))


@pytest.fixture
async def site():
    return Site()


def watched(part: Any, name: str) -> Mock:
    """That method of `part`, in whose place something listens."""
    mock = Mock()
    try:
        setattr(part, name, mock)
    except AttributeError:
        object.__setattr__(part, name, mock)
    return mock


# --- the stream -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("channels", "known"), [([QUESTIONS, TASKS, SEGMENTS], True), ([CALLS, SEGMENTS], False)])
async def test_a_role_that_takes_its_tickets_itself_makes_units_of_these_alone(site, channels, known):
    site.welcome(channels=channels)
    assert site.host.in_hand.has_all is known


async def test_a_hello_says_who_this_is_and_what_it_has(site):
    site.welcome()
    site.hear(cancel=pb.Cancel(channel="tasks", branch=4))
    unit = pb.Unit(key="env:1@3", step=3)
    produced, taken = pb.HeldUnit(channel="segments", unit=unit), pb.HeldUnit(channel="tasks", unit=unit)
    site.session.queues["q"] = SimpleNamespace(
        out=SimpleNamespace(hello=lambda: [produced]), into=SimpleNamespace(hello=lambda: [taken])
    )
    hello = site.session.hello(highest_driver_attempt=6)
    assert hello == pb.WorkerMessage(
        hello=pb.Hello(
            job_uid="j",
            worker="env/1",
            attempt=2,
            protocol=names.PROTOCOL,
            highest_driver_attempt=6,
            endpoint=messages.endpoint_to_pb(ME),
            produced=[produced],
            taken=[taken],
            world=2,
            highest_branch=4,
        )
    )


async def test_a_hello_says_what_the_steps_have_to_say(site):
    site.session.steps.begun = PolicyVersion(1, 4)
    hello = site.session.hello(highest_driver_attempt=0).hello
    assert (hello.ready, hello.committed) == (True, pb.PolicyVersion(branch=1, number=4))


async def test_the_highest_branch_is_of_the_driver_or_of_the_weights(site):
    site.welcome()
    site.hear(cancel=pb.Cancel(channel="tasks", branch=4))
    assert site.session.highest_branch == 4
    site.session.weights = SimpleNamespace(highest_branch=7)
    assert site.session.highest_branch == 7


async def test_the_first_welcome_opens_this_roles_channels_and_the_links(site):
    assert site.links.start.call_count == 0
    site.welcome()
    session = site.session
    assert (list(session.askers), list(session.answerers)) == (["questions"], ["calls"])
    assert list(session.queues) == ["segments", "tasks"], "not those of other roles, and weights are no queue"
    assert session.flow == FLOW
    assert [session.replans.stages(name) for name in ("questions", "calls", "segments", "others")] == [2, 0, 0, 0]
    site.welcome()
    assert site.links.start.call_count == 1


async def test_each_driver_welcomes_queues_facts_steps_and_the_gang(site):
    site.welcome()
    session = site.session
    heard = {
        "questions": watched(session.askers["questions"], "on_new_driver"),
        "segments": watched(session.queues["segments"].into, "on_welcome"),
        "steps": watched(session.steps, "on_welcome"),
        "facts": watched(session.facts, "on_welcome"),
    }
    facts = [pb.Fact(name="shape", json="3")]
    session.gang.join = pb.Join()
    site.told.clear()
    site.welcome(is_new_driver=False, driver_attempt=1, facts=facts)
    assert site.told == [pb.WorkerMessage(join=pb.Join())]
    assert heard["questions"].mock_calls == []
    assert heard["segments"].mock_calls == [call(is_new_driver=False)]
    assert heard["steps"].mock_calls == [call(driver_attempt=1)]
    assert [list(one.args[0]) for one in heard["facts"].mock_calls] == [facts]
    session.gang.join = None
    site.welcome(is_new_driver=True, driver_attempt=2)
    assert len(site.told) == 1
    assert heard["questions"].mock_calls == [call()]
    assert heard["segments"].mock_calls[1:] == [call(is_new_driver=True)]
    assert heard["steps"].mock_calls[1:] == [call(driver_attempt=2)]


@pytest.mark.parametrize(("number", "begun"), [(0, False), (1, False), (2, True)])
async def test_a_worker_of_a_plan_that_came_later_finds_a_job_that_has_begun(site, number, begun):
    site.welcome(switch_number=number)
    assert site.links.has_begun is begun
    site.links.has_begun = True
    site.welcome(switch_number=0)
    assert site.links.has_begun is True


@pytest.mark.parametrize(("own", "drivers", "uri"), [("", "/driver", "/driver"), ("/pod", "/driver", "/pod")])
async def test_a_pods_own_path_of_checkpoints_comes_first(own, drivers, uri):
    site = Site(checkpoint_uri=own)
    assert (site.session.checkpoint_uri, site.session.checkpoint_keep) == (own, KEEP)
    site.welcome(checkpoint_uri=drivers, checkpoint_keep=7)
    assert (site.session.checkpoint_uri, site.session.checkpoint_keep) == (uri, 7)


async def test_a_welcome_that_keeps_no_number_of_checkpoints_leaves_the_usual(site):
    site.welcome()
    assert site.session.checkpoint_keep == KEEP


async def test_a_welcome_says_whose_parts_make_a_checkpoint(site):
    site.welcome(gangs=["actor", "critic"])
    assert site.session.gangs == ("actor", "critic")


# --- who hears what ---------------------------------------------------------------------------------------------------
UNIT = pb.Unit(key="k", branch=2, step=1)
VERSION = pb.PolicyVersion(branch=2, number=5)
UIDS = pb.Keys(channel="segments", branch=2, keys=["k"])


@pytest.mark.parametrize(
    ("kind", "said", "part", "method", "given"),
    [
        ("assign", pb.Assign(channel="tasks", units=[UNIT]), "queues.tasks.into", "on_assign", None),
        ("round", pb.Round(channel="tasks", branch=2, units=[UNIT]), "queues.tasks.into", "on_round", None),
        ("released", UIDS, "queues.segments.out", "on_released", [(2, "k")]),
        ("held", UIDS, "queues.segments.out", "on_held", [(2, "k")]),
        ("step_commit", pb.StepCommit(step=5, version=VERSION), "steps", "on_commit", None),
        ("cancel", pb.Cancel(channel="tasks", branch=2), "queues.tasks", "on_cancel", None),
        ("roster", pb.Roster(number=3), "gang", "on_roster", None),
        ("begin", pb.Begin(version=VERSION), "steps", "on_begin", None),
        ("fact", pb.Fact(name="a", json="1"), "facts", "on_fact", None),
        ("replan", pb.Replan(switch_number=4), "replans", "on_replan", None),
        ("links", pb.Links(), "replans", "on_links", None),
    ],
)
async def test_each_word_of_the_driver_reaches_whom_it_is_for(site, kind, said, part, method, given):
    site.welcome()
    found: Any = site.session
    for name in part.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    heard = watched(found, method)
    site.hear(**{kind: said})
    (one,) = heard.mock_calls
    argument = one.args[0]
    assert (list(argument) if isinstance(given, list) else argument) == (said if given is None else given)
    assert site.session.highest_branch == (2 if kind not in ("roster", "fact", "replan", "links") else 0)
    assert site.links.has_begun is (kind in ("assign", "round"))


async def test_a_word_that_this_version_does_not_know_is_left_out(site):
    site.hear()
    assert site.told == []


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"assign": pb.Assign(channel="others")}, "the driver spoke of queue 'others': wanted segments, tasks"),
        ({"route": pb.Route(channel="calls")}, "the driver gave a route of cycle 'calls': wanted questions"),
    ],
)
async def test_a_word_of_a_channel_that_this_worker_has_no_end_of_is_a_bug(site, said, words):
    site.welcome()
    with pytest.raises(InvariantBroken, match=words):
        site.hear(**said)


# --- routes -----------------------------------------------------------------------------------------------------------
@pytest.fixture
async def routed(site):
    site.welcome()
    asker, weights = site.session.askers["questions"], site.session.weights
    return SimpleNamespace(
        on=watched(asker, "on_route"),
        off=watched(asker, "on_unroute"),
        weights_on=watched(weights, "on_route"),
        weights_off=watched(weights, "on_unroute"),
    )


def route(channel: str, *, roster: int = 0, outgoing: bool = False) -> pb.Route:
    there = messages.endpoint_to_pb(THERE)
    return pb.Route(channel=channel, peer=there, outgoing=outgoing, credit=6, number=7, roster=roster)


async def test_routes_of_cycles_and_weights_begin_and_end(site, routed):
    site.hear(route=route("questions"))
    site.hear(unroute=pb.Unroute(channel="questions", worker="rollout/0", attempt=3, number=8))
    for outgoing in (True, False):
        site.hear(route=route("weights", outgoing=outgoing))
    site.hear(unroute=pb.Unroute(channel="weights", worker="rollout/0", attempt=3, number=8))
    assert routed.on.mock_calls == [call(THERE, credit=6, number=7)]
    assert routed.off.mock_calls == [call("rollout/0", 3, number=8)]
    assert routed.weights_on.mock_calls == [call(THERE, outgoing=True), call(THERE, outgoing=False)]
    assert routed.weights_off.mock_calls == [call("rollout/0", 3)]


async def test_a_route_of_an_older_roster_is_left_out_and_counted(site, routed):
    for roster in (4, 3, 4, 5):
        site.hear(route=route("questions", roster=roster))
    assert routed.on.call_count == 3
    assert site.session.stale_instructions == 1
    site.hear(route=route("questions", roster=4))
    assert (routed.on.call_count, site.session.stale_instructions) == (3, 2)


async def test_a_new_driver_counts_rosters_for_itself(site, routed):
    site.hear(route=route("questions", roster=9))
    site.welcome(is_new_driver=False)
    site.hear(route=route("questions", roster=1))
    assert routed.on.call_count == 1
    site.welcome(is_new_driver=True)
    site.hear(route=route("questions", roster=1))
    assert routed.on.call_count == 2


# --- plans ------------------------------------------------------------------------------------------------------------
async def test_another_plan_changes_sizes_of_the_ends_that_are_there_and_is_answered(site):
    site.welcome()
    replans = site.session.replans
    spec, credit = (watched(site.session.queues["tasks"], "on_spec"), list[Mock]())
    credit += [watched(queue.into, "state_credit_anew") for queue in site.session.queues.values()]
    other = pb.ChannelSpec(name="tasks", micro_batch=5)
    more = [
        pb.ChannelSpec(name="questions", stages=4), pb.ChannelSpec(name="others", stages=9), other,
    ]  # fmt: skip
    site.told.clear()
    site.hear(replan=pb.Replan(plan_revision=3, switch_number=2, world=5, channels=more))
    assert (replans.world, replans.number, replans.stages("questions"), replans.stages("others")) == (5, 2, 4, 0)
    assert spec.mock_calls == [call(other)]
    assert [mock.call_count for mock in credit] == [1, 1]
    done = pb.WorkerMessage(replanned=pb.Replanned(switch_number=2))
    assert site.told == [done]
    site.hear(replan=pb.Replan(plan_revision=2, switch_number=2))
    assert (replans.world, len(site.told)) == (5, 2), "the same switch, once more"
    site.hear(replan=pb.Replan(plan_revision=4, switch_number=1, world=1))
    assert (replans.world, len(site.told), site.session.stale_instructions) == (5, 2, 1)


async def test_a_plan_is_answered_once_the_role_is_settled_and_credit_is_said_with_the_answer(site, monkeypatch):
    """Credit that went before the answer would be forgotten with it, and the job stand still."""
    site.welcome()
    later, credit = list[Callable[[], None]](), watched(site.session.queues["tasks"].into, "state_credit_anew")
    monkeypatch.setattr(site.session.replans, "_settle", later.append)
    site.told.clear()
    site.hear(replan=pb.Replan(plan_revision=3, switch_number=2))
    assert (site.told, credit.call_count) == ([], 0)
    later[0]()
    done = pb.WorkerMessage(replanned=pb.Replanned(switch_number=2))
    assert (site.told, credit.call_count) == ([done], 1)
    site.welcome(switch_number=3)
    assert len(later) == 2, "another plan may have come while the stream was broken"


async def test_a_welcome_tells_of_the_plan_in_force(site):
    site.welcome(switch_number=5, world=3)
    replans = site.session.replans
    assert (replans.number, replans.world) == (5, 3)
    site.welcome(switch_number=2, channels=[pb.ChannelSpec(name="questions", stages=7)])
    assert (replans.number, replans.world, replans.stages("questions")) == (2, 3, 7), "a new driver's number counts"


async def test_what_the_plan_gives_is_an_event_to_whoever_waits_for_another(site):
    site.welcome(allotment=pb.Allotment(kv_bytes=5, option="eager"))
    replans = site.session.replans
    first = await replans.other_allotment(Allotment())
    assert first == replans.allotment == Allotment(kv_bytes=5, option="eager")
    other = asyncio.ensure_future(replans.other_allotment(first))
    site.hear(replan=pb.Replan(switch_number=1, allotment=pb.Allotment(kv_bytes=5, option="eager")))
    await asyncio.sleep(0)
    assert not other.done(), "another plan that gives the same"
    assert site.host.waits.tasks == set(), "no wait of the role"
    site.hear(replan=pb.Replan(switch_number=2, allotment=pb.Allotment(kv_bytes=7)))
    assert await other == Allotment(kv_bytes=7)
    last = asyncio.ensure_future(replans.other_allotment(Allotment(kv_bytes=7)))
    await asyncio.sleep(0)
    site.host.waits.stop("the job ends")
    with pytest.raises(ChannelClosed):
        await last


async def test_a_world_that_nobody_names_is_that_of_the_start(site):
    site.welcome()
    assert site.session.replans.world == 2


async def test_memory_that_a_role_keeps_beyond_its_plan_is_said_once_and_to_each_driver_until_it_is_no_more():
    site = Site(slots=(0, 1))
    site.welcome(allotment=pb.Allotment(offloaded_bytes=1 << 30))
    site.told.clear()
    site.session.left_slots(2 << 30)
    assert site.told == [], "as the plan says, of two slots"
    for _ in range(2):
        site.session.left_slots(3 << 30)
    [said] = site.told
    assert said.kept.words.startswith(
        "worker env/1 has left its slots and keeps 3072 MiB on them, measured, and its plan"
    )
    site.welcome(allotment=pb.Allotment(offloaded_bytes=1 << 30))
    assert site.told == [said, said]
    site.session.left_slots(1 << 30)
    assert site.told[2:] == [pb.WorkerMessage(kept=pb.Kept())]
    site.told.clear()
    site.welcome(allotment=pb.Allotment())
    site.session.left_slots(9 << 40)
    assert site.told == [], "a plan that does not say"


async def test_links_are_made_ahead_for_a_plan_and_given_up_with_the_next(site):
    site.welcome()
    site.links.want.side_effect = lambda endpoint, **_: endpoint.worker
    there = messages.endpoint_to_pb(THERE)
    site.hear(links=pb.Links(peers=[there]))
    assert site.links.want.mock_calls == [call(THERE, by="plan", at_once=True)]
    for _ in range(2):
        site.hear(replan=pb.Replan(switch_number=1))
    assert site.links.unwant.mock_calls == [call("rollout/0", by="plan")]


async def test_a_role_that_has_loaded_lets_its_links_look_for_the_gpu(site):
    site.session.on_device()
    assert site.links.on_device.call_count == 1


# --- facts ------------------------------------------------------------------------------------------------------------
async def test_a_fact_is_told_and_told_again_to_each_driver(site):
    facts = Facts(site.host)
    facts.share("shape", {"b": 1, "a": 2})
    facts.share("shape", {"a": 2, "b": 1})
    told = pb.WorkerMessage(fact=pb.Fact(name="shape", json='{"a":2,"b":1}'))
    assert site.told == [told, told]
    with pytest.raises(UserError, match=r"fact 'shape' was shared before with another value: got 3"):
        facts.share("shape", 3)
    facts.on_welcome([pb.Fact(name="theirs", json="[4]")])
    assert site.told == [told] * 3
    assert await facts.shared("theirs") == [4]


@pytest.mark.parametrize(("size", "fits"), [(plain.MAX_BYTES - 2, True), (plain.MAX_BYTES - 1, False)])
async def test_a_fact_is_small(site, size, fits):
    """Two more are its quotes."""
    facts = Facts(site.host)
    if fits:
        facts.share("large", "x" * size)
        assert len(json.loads(site.told[0].fact.json)) == size
    else:
        with pytest.raises(UserError, match="fact 'large' cannot be shared: got 65537 bytes, wanted at most 65536"):
            facts.share("large", "x" * size)
        assert site.told == []


async def test_a_job_keeps_only_so_many_facts(site):
    """Each Welcome has all of them: one that is larger than a message can be would reach no worker any more."""
    facts = Facts(site.host)
    facts.on_welcome([pb.Fact(name=f"theirs-{n}", json="1" * 2**16) for n in range(15)])
    facts.share("step-1", "x" * 60_000)
    with pytest.raises(UserError) as refused:
        facts.share("step-2", "x" * 60_000)
    assert str(refused.value) == (
        "role 'env' shares more facts than a job keeps, the last is 'step-2': got 1103181 bytes in 17, wanted at most "
        "1048576 of all roles; share once what others need to load; what goes from step to step has channels"
    )
    facts.on_welcome([])
    assert [message.fact.name for message in site.told] == ["step-1"] * 2


async def test_a_fact_is_waited_for_by_name(site):
    site.host.peer_wait_s = 0.001
    with pytest.raises(DeadlineExceeded, match=r"fact 'shape' .* a worker of the role that knows it"):
        await Facts(site.host).shared("shape")


async def test_a_fact_that_json_cannot_write_is_said_by_its_name(site):
    with pytest.raises(UserError, match=r"fact 'shape' cannot be shared: got ndarray .*, wanted what JSON can write"):
        Facts(site.host).share("shape", np.zeros(2))
    Facts(site.host).share("count", np.int64(3))
    assert site.told[0].fact.json == "3"


# --- branches ---------------------------------------------------------------------------------------------------------
async def test_of_branches_the_highest_is_kept(site):
    site.welcome()
    assert site.session.highest_branch == 0
    for branch, units in ((3, ()), (1, ()), (0, (2, 5, 4)), (0, ())):
        site.session.on_message(pb.DriverMessage(cancel=pb.Cancel(channel="tasks", branch=branch)))
        said = pb.Assign(channel="tasks", units=[pb.Unit(branch=one) for one in units])
        site.session.on_message(pb.DriverMessage(assign=said))
    assert site.session.highest_branch == 5


@pytest.mark.parametrize(
    ("role", "gangs", "has_others"),
    [("actor", ["actor", "critic"], True), ("actor", ["actor"], False), ("env", ["actor", "critic"], False)],
)
async def test_a_rank_hears_whether_other_gangs_end_steps_with_its_own(role, gangs, has_others):
    site = Site(role=role)
    site.welcome(gangs=gangs)
    assert site.session.gang.has_others is has_others
