"""Exchange: what workers say of units becomes words to those whom it concerns, and to nobody else."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels import messages
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.channel_specs import channel_specs
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.members import WorkerState
from rlinf_worker.driver.topology import CycleSpec, QueueSpec, Topology, WeightsSpec
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.queues.units import Age, UnitId, UnitInfo
from rlinf_worker.uplink.outbox import Outbox
from tests.builders_driver import Clock, make_job

START = PolicyVersion(0, 0)
ENV = WorkerId("env/0")
SEGMENTS = QueueSpec(channel="segments", producer="", consumer="env", rounds=False)
TRAJECTORIES = QueueSpec(channel="trajectories", producer="env", consumer="actor", rounds=True)
ACTIONS = CycleSpec(channel="actions", asker="env", answerer="rollout")
WEIGHTS = WeightsSpec(producer="actor", consumer="rollout")


class Site:
    """Two envs, one rollout, one actor; all connected, all with credit; step 1 needs two slices."""

    def __init__(self, topology: Topology | None = None) -> None:
        made = make_job(envs=2, slices=2, micro_batch=2, critics=1)
        self.job = made.known(Clock())
        self.members, self.sessions = self.job.members, self.job.sessions
        self.members.adopt(made.placement)
        self.job.placement = made.placement
        self.job.topology = topology or Topology(cycles=(ACTIONS,), queues=(SEGMENTS, TRAJECTORIES))
        self.exchange = Exchange(self.job)
        self.exchange.declare()
        for wid, record in self.members.workers.items():
            record.state, record.attempt, record.endpoint = WorkerState.READY, 1, Endpoint(worker=wid, attempt=1)
            self.sessions.workers.enter(wid, Outbox[Any](), 1)
        for worker, channel in (("env/0", "segments"), ("env/1", "segments"), ("actor/0", "trajectories")):
            self.exchange.queue(channel).core.consumers.credit(WorkerId(worker), 8)
        self.tickets = [
            UnitInfo(key=f"env:{n}@1", branch=0, step=1, inline=b'{"slice": 0}', affinity=n) for n in range(2)
        ]

    def open(self) -> None:
        self.put(self.tickets)
        self.say_all()
        self.exchange.match()

    def say_all(self) -> None:
        """These were all tickets of the step."""
        step = self.job.ledger.open(1, now=0.0)
        for gang in self.job.topology.gangs_behind("segments"):
            step.part(gang.consumer).wanted.update({t.key: 1 for t in self.tickets})
        self.exchange.open_step(step)

    def put(self, tickets) -> None:
        self.exchange.put_tickets("segments", tickets, wanted={t.key: 1 for t in tickets})

    def told(self, worker: str) -> list[tuple[str, list[str]]]:
        """(kind, keys) since the last look."""
        said = []
        messages = self.sessions.workers[WorkerId(worker)].outbox._messages
        for message in messages:
            kind = str(message.WhichOneof("kind"))
            inner: Any = getattr(message, kind)
            keys = [u.key for u in inner.units] if kind in ("assign", "round") else list(getattr(inner, "keys", ()))
            said.append((kind, keys))
        messages.clear()
        return said

    def made(self, worker: str, key: str, *, branch: int = 0, parent: str | None = None, size: int = 0) -> None:
        step = int(key.split("@")[1])
        unit = pb.Unit(key=key, branch=branch, step=step, weight=1, bytes=size)
        self.exchange.queue("trajectories").announced([unit], producer=WorkerId(worker), after=Age(0, 0))
        self.exchange.match()

    def held(self, worker: str, channel: str, *keys: str) -> None:
        self.exchange.queue(channel).held(WorkerId(worker), pb.Keys(keys=keys))
        self.exchange.match()

    def acked(self, worker: str, channel: str, *keys: str) -> None:
        self.exchange.queue(channel).acked(WorkerId(worker), pb.Keys(keys=keys))


@pytest.fixture
def site() -> Site:
    site = Site()
    site.open()
    return site


def test_held_and_released_are_told_to_the_producer_of_each_unit(site):
    assert site.told("env/0") == [("assign", ["env:0@1"])]
    assert site.told("env/1") == [("assign", ["env:1@1"])]
    site.made("env/0", "env:0@1")
    site.made("env/1", "env:1@1")
    assert site.told("actor/0") == [("round", ["env:0@1", "env:1@1"])]
    site.held("actor/0", "trajectories", "env:0@1", "env:1@1")
    assert (site.told("env/0"), site.told("env/1")) == ([("held", ["env:0@1"])], [("held", ["env:1@1"])])
    assert site.told("actor/0") == [("round", [])]
    site.acked("actor/0", "trajectories", "env:1@1")
    assert (site.told("env/0"), site.told("env/1")) == ([], [("released", ["env:1@1"])])


def test_a_round_names_where_its_units_are(site):
    site.made("env/1", "env:1@1")
    site.made("env/0", "env:0@1")
    (message,) = site.sessions.workers[WorkerId("actor/0")].outbox._messages
    assert [(p.worker, p.attempt) for p in message.round.producers] == [("env/1", 1), ("env/0", 1)]


def test_a_duplicate_and_a_unit_that_comes_too_late_are_released_at_once(site):
    site.told("env/1")
    site.made("env/0", "env:0@1")
    site.made("env/1", "env:0@1")
    assert site.told("env/1") == [("released", ["env:0@1"])]
    unit = pb.Unit(key="env:1@1", branch=0, step=1)
    site.exchange.queue("trajectories").announced([unit], producer=WorkerId("env/1"), after=Age(0, 1))
    site.exchange.queue("trajectories").announced([unit], producer=WorkerId("env/1"), after=Age(1, 0))
    assert site.told("env/1") == [("released", ["env:1@1"])] * 2
    assert site.exchange.queues["trajectories"].core.counts["late"] == 2


def test_a_unit_that_its_step_does_not_expect_is_released_when_that_has_committed(site):
    """It could never be handed out, and took of its producer's room for good."""
    for key in ("env:0@1", "env:1@1", "other:0@1", "other:0@2"):
        site.made("env/0", key)
    site.held("actor/0", "trajectories", "env:0@1", "env:1@1")
    site.told("env/0")
    site.exchange.close_step(1, branch=0)
    assert site.told("env/0") == [("released", ["other:0@1"])]
    site.acked("actor/0", "trajectories", "env:0@1", "env:1@1")
    assert site.told("env/0") == [("released", ["env:0@1", "env:1@1"])]
    assert site.exchange.queues["trajectories"].core.counts["late"] == 1


def test_a_ticket_whose_unit_is_made_is_not_handed_out_again():
    """A new driver: the units are announced by hellos, then the flow puts all tickets of the step."""
    site = Site()
    site.made("env/0", "env:0@1")
    site.open()
    assert (site.told("env/0"), site.told("env/1")) == ([], [("assign", ["env:1@1"])])


def test_the_ticket_of_a_lost_unit_waits_again(site):
    site.made("env/0", "env:0@1")
    site.held("env/0", "segments", "env:0@1")
    site.acked("env/0", "segments", "env:0@1")
    site.told("env/0")
    assert not site.exchange.gone(WorkerId("env/0"), "env")
    site.exchange.queue("segments").core.consumers.credit(WorkerId("env/0"), 1)
    site.exchange.match()
    assert site.told("env/0") == [("assign", ["env:0@1"])]


def test_what_another_has_made_already_is_not_measured(site):
    site.made("env/0", "env:0@1", size=30)
    site.made("env/1", "env:0@1", size=99)
    site.exchange.close_step(1, branch=0)
    sizes = site.exchange.measured()["trajectories"]
    assert (sizes.step_units, sizes.step_bytes, sizes.largest_bytes) == (1, 30, 30)


@pytest.mark.parametrize("lost", ["with its producer", "with its branch"])
def test_what_is_made_again_is_measured_once(site, lost):
    """Or a channel that holds a step exactly would count as too small for the rest of the job."""
    site.made("env/0", "env:0@1", size=30)
    branch = 0 if lost == "with its producer" else 1
    if branch:
        site.made("env/1", "other:1@1", size=50)  # as it went before: with weights of its own, it may make others
        site.exchange.cancel(0)
    else:
        site.exchange.gone(WorkerId("env/0"), "env")
    for worker in (0, 1):
        site.made(f"env/{worker}", f"env:{worker}@1", branch=branch, size=40)
    site.exchange.close_step(1, branch=branch)
    sizes = site.exchange.measured()["trajectories"]
    assert (sizes.step_units, sizes.step_bytes) == (2, 80)


def test_a_unit_that_is_held_survives_its_producer(site):
    site.made("env/0", "env:0@1")
    site.made("env/1", "env:1@1")
    site.held("actor/0", "trajectories", "env:0@1")
    site.acked("env/0", "segments", "env:0@1")
    site.exchange.gone(WorkerId("env/0"), "env")
    site.told("env/0")
    site.exchange.queue("segments").core.consumers.credit(WorkerId("env/0"), 1)
    site.exchange.match()
    assert site.told("env/0") == []
    assert site.exchange.ends.waiting_for(1) == ["env:1@1"]


def test_what_a_living_peer_keeps_and_a_consumer_could_not_fetch_is_handed_out_again(site):
    """Not released: the ticket that it was made from would count as done, with the unit nowhere."""
    site.made("env/0", "env:0@1")
    site.made("env/1", "env:1@1")
    for worker in ("env/0", "actor/0"):
        site.told(worker)
    lost = pb.PeerLost(worker="env/0", units=pb.Keys(channel="trajectories", keys=["env:0@1"]))
    site.exchange.peer_lost(WorkerId("actor/0"), lost)
    site.exchange.queue("trajectories").core.consumers.credit(WorkerId("actor/0"), 2)
    site.exchange.match()
    assert site.told("env/0") == []
    assert site.told("actor/0") == [("round", ["env:0@1"])]


@pytest.mark.parametrize(
    ("peer", "attempt", "is_heard"), [("env/0", 1, True), ("env/0", 2, False), ("env/7", 0, False)]
)
def test_the_loss_of_another_life_or_of_a_stranger_moves_nothing(site, peer, attempt, is_heard):
    """What a life kept that has ended was settled as it ended."""
    site.made("env/0", "env:0@1")
    site.acked("env/0", "segments", "env:0@1")
    site.made("env/1", "env:1@1")
    site.told("env/0")
    site.exchange.peer_lost(WorkerId("actor/0"), pb.PeerLost(worker=peer, attempt=attempt, missing=True))
    site.exchange.match()
    assert site.told("env/0") == ([("assign", ["env:0@1"])] if is_heard else [])


def test_what_a_living_peer_does_not_have_is_made_again(site):
    site.made("env/0", "env:0@1")
    site.acked("env/0", "segments", "env:0@1")
    site.made("env/1", "env:1@1")
    site.told("env/0")
    site.exchange.peer_lost(WorkerId("actor/0"), pb.PeerLost(worker="env/0", missing=True))
    site.exchange.match()
    assert site.told("env/0") == [("assign", ["env:0@1"])]


def test_of_what_a_consumer_could_not_fetch_only_what_it_names_goes_to_another(site):
    core = site.exchange.queue("trajectories").core
    for n in range(2):
        site.made(f"env/{n}", f"env:{n}@1")
    site.exchange.match()
    [(_, given)] = [told for told in site.told("actor/0") if told[0] == "round"]
    assert given == ["env:0@1", "env:1@1"]
    again = core.counts["redelivered"]
    units = pb.Keys(channel="trajectories", branch=0, keys=["env:1@1"])
    site.exchange.peer_lost(WorkerId("actor/0"), pb.PeerLost(worker="env/0", attempt=1, units=units))
    assert core.counts["redelivered"] == again, "env/0 has made none of those"
    units.keys[:] = ["env:0@1"]
    site.exchange.peer_lost(WorkerId("actor/0"), pb.PeerLost(worker="env/0", attempt=1, units=units))
    assert core.counts["redelivered"] == again + 1


def test_a_cancelled_branch_is_released_by_its_producers_and_cancelled_by_its_consumers(site):
    site.made("env/0", "env:0@1")
    for worker in ("env/0", "env/1", "actor/0"):
        site.told(worker)
    site.exchange.cancel(0)
    assert site.told("env/0") == [("cancel", []), ("released", ["env:0@1"])]
    assert site.told("actor/0") == [("cancel", [])]
    site.exchange.match()
    assert site.told("env/1") == [("cancel", [])]


def test_who_is_told_of_a_cancelled_branch_is_told_which_of_each_channel(site):
    for worker in ("env/0", "actor/0"):
        site.told(worker)
    site.exchange.cancel(3)
    for worker, channel in (("env/0", "segments"), ("actor/0", "trajectories")):
        (message,) = site.sessions.workers[WorkerId(worker)].outbox._messages
        assert message == pb.DriverMessage(cancel=pb.Cancel(channel=channel, branch=3))


def test_a_ticket_of_a_step_that_is_over_is_not_made_again(site):
    queue = site.exchange.queue("segments")
    for n in range(2):
        site.acked(f"env/{n}", "segments", f"env:{n}@1")
    queue.tickets.make_again([site.tickets[0].id])
    assert queue.core.knows(site.tickets[0].id)
    site.exchange.close_step(1, branch=0)
    site.told("env/0"), site.told("env/1")
    queue.tickets.make_again([site.tickets[1].id])
    site.exchange.match()
    assert site.told("env/1") == []


def test_what_a_stream_lost_is_said_again_on_the_next_hello(site):
    site.told("env/0")
    site.exchange.reconnected(WorkerId("env/0"), "env", pb.Hello(worker="env/0"), after=START)
    assert site.told("env/0") == [("assign", ["env:0@1"])]
    held = pb.HeldUnit(channel="segments", unit=pb.Unit(key="env:0@1", step=1))
    site.exchange.reconnected(WorkerId("env/0"), "env", pb.Hello(worker="env/0", taken=[held]), after=START)
    assert site.told("env/0") == []
    site.made("env/0", "env:0@1")
    site.made("env/1", "env:1@1")
    site.told("actor/0")
    site.exchange.reconnected(WorkerId("actor/0"), "actor", pb.Hello(worker="actor/0"), after=START)
    assert site.told("actor/0") == [("round", ["env:0@1", "env:1@1"])]


def test_workers_are_told_of_every_channel_with_its_sizes_and_each_producer_of_its_share():
    site = Site(Topology(cycles=(ACTIONS,), queues=(SEGMENTS, TRAJECTORIES), weights=(WEIGHTS,)))
    cycle, weights, segments, trajectories = channel_specs(site.job)
    assert cycle == pb.ChannelSpec(
        name="actions", mode="Cycle", producer="env", consumer="rollout", micro_batch=1, depth=2
    ), "no plan says stages: who asks goes by its own"
    assert weights == pb.ChannelSpec(name=WEIGHTS.channel, mode="Weights", producer="actor", consumer="rollout")
    queue = pb.ChannelSpec(mode="Queue", consumer="env", micro_batch=1, depth=2)
    queue.name, queue.capacity_units, queue.capacity_bytes = "segments", 1024, 1 << 30
    assert segments == queue
    queue.name, queue.capacity_units, queue.capacity_bytes = "trajectories", 512, 1 << 29
    queue.producer, queue.consumer, queue.micro_batch, queue.rounds, queue.until_commit = "env", "actor", 2, True, True
    assert trajectories == queue, "of two envs, each half"
    site.job.placement = replace(site.job.placement, stages={ACTIONS.roles: 3})
    assert channel_specs(site.job)[0].stages == 3


def test_a_route_of_a_cycle_is_told_once_to_who_asks_and_taken_back(site):
    for worker in ("env/0", "env/1", "rollout/0"):
        site.told(worker)
    site.exchange.routes.update()
    site.exchange.routes.update()
    assert [k for k, _ in site.told("env/0")] == [k for k, _ in site.told("env/1")] == ["route"]
    site.members.workers[WorkerId("rollout/0")].state = WorkerState.DOWN
    assert site.told("rollout/0") == [], "who answers is told nothing"
    site.sessions.workers.close(WorkerId("rollout/0"), "it died")
    site.exchange.routes.update()
    assert [k for k, _ in site.told("env/0")] == [k for k, _ in site.told("env/1")] == ["unroute"]
    site.exchange.routes.update()
    assert (site.told("env/0"), site.told("env/1")) == ([], []), "it is taken back once"
    site.exchange.reconnected(WorkerId("env/0"), "env", pb.Hello(), after=START)
    assert ("unroute" in dict(site.told("env/0")), site.told("env/1")) == (True, []), "to who may not have heard of it"


def test_a_route_to_one_that_has_not_said_where_it_listens_names_it_all_the_same(site):
    site.members.workers[WorkerId("rollout/0")].endpoint = None
    site.told("env/0")
    site.exchange.routes.update()
    (message,) = site.sessions.workers[WorkerId("env/0")].outbox._messages
    assert (message.route.peer.worker, message.route.peer.attempt, message.route.peer.host) == ("rollout/0", 0, "")


def test_a_route_of_weights_is_told_to_both_ends_and_taken_back_from_whoever_stays(site):
    site.job.topology = replace(site.job.topology, weights=(WEIGHTS,))
    for worker in ("actor/0", "rollout/0", "env/0"):
        site.told(worker)
    site.exchange.routes.update()
    boxes = [site.sessions.workers[WorkerId(worker)].outbox._messages for worker in ("actor/0", "rollout/0")]
    assert [[message.route.outgoing for message in box] for box in boxes] == [[True], [False]]
    assert [k for k, _ in site.told("actor/0")] == [k for k, _ in site.told("rollout/0")] == ["route"]
    site.members.workers[WorkerId("rollout/0")].state = WorkerState.DOWN
    site.sessions.workers.close(WorkerId("rollout/0"), "it died")
    site.exchange.routes.update()
    assert [k for k, _ in site.told("actor/0")] == ["unroute"]


def test_a_channel_that_the_flow_does_not_have_is_named(site):
    with pytest.raises(UserError, match="'segmnts' is no queue of this flow: wanted one of segments, trajectories"):
        site.exchange.queue("segmnts").core.consumers.credit(WorkerId("env/0"), 1)


def test_tickets_of_one_that_is_away_wait_for_others_until_it_is_back(site):
    env_1 = WorkerId("env/1")
    site.told("env/0"), site.told("env/1")
    site.members.workers[env_1].state = WorkerState.DOWN
    site.exchange.gone(env_1, "env")
    site.exchange.match()
    assert site.told("env/0") == [], "it may be back in a moment"
    assert site.exchange.stand_in(frozenset({env_1})) == 1
    site.exchange.match()
    assert ("assign", ["env:1@1"]) in site.told("env/0")

    later = [UnitInfo(key=f"env:{n}@2", branch=0, step=2, inline=b"{}", affinity=n) for n in range(2)]
    site.put(later)
    site.exchange.match()
    assert ("assign", ["env:0@2", "env:1@2"]) in site.told("env/0")
    assert site.exchange.queues["segments"].core.counts["rehomed"] == 2

    site.members.workers[env_1].state = WorkerState.READY
    site.exchange.queue("segments").core.consumers.credit(env_1, 8)
    assert site.exchange.stand_in(frozenset()) == 0, "what another has in hand stays with it"
    site.put([structs.replace(u, key=u.key[:-1] + "3", step=3) for u in later])
    site.exchange.match()
    assert ("assign", ["env:1@3"]) in site.told("env/1")
    assert site.exchange.queues["segments"].core.counts["rehomed"] == 2


def put_by_affinity(site, step: int, affinities: int) -> dict[str, list[str]]:
    """A step's tickets, one of each affinity; who was handed which."""
    names = ("env/0", "env/1")
    for worker in names:
        site.told(worker)
        site.exchange.queue("segments").core.consumers.credit(WorkerId(worker), 8)
    site.put(
        [UnitInfo(key=f"env:{n}@{step}", branch=0, step=step, inline=b"{}", affinity=n) for n in range(affinities)]
    )
    site.exchange.match()
    return {w: [key for kind, keys in site.told(w) if kind == "assign" for key in keys] for w in names}


def test_a_flow_that_has_an_affinity_for_each_of_fewer_workers_keeps_all_of_them_at_work(site):
    """Two of four went with another plan: of the four affinities that there were, the first two were one worker's."""
    site.exchange.close_step(1, branch=0)
    halves = {"env/0": ["env:0@2", "env:1@2"], "env/1": ["env:2@2", "env:3@2"]}
    assert put_by_affinity(site, 2, affinities=4) == halves
    site.exchange.close_step(2, branch=0)
    consumers = site.exchange.queue("segments").core.consumers
    consumers.ranked = [*consumers.ranked, WorkerId("env/2"), WorkerId("env/3")]
    site.exchange.replan()
    assert put_by_affinity(site, 3, affinities=2) == {"env/0": ["env:0@3"], "env/1": ["env:1@3"]}


def test_affinities_that_a_flow_has_no_more_are_forgotten_with_the_step_after(site):
    put_by_affinity(site, 2, affinities=4)
    assert site.exchange.queue("segments").tickets.affinities == 4, "step 1, which is open, has two"
    put_by_affinity(site, 3, affinities=2)
    for step, known in ((1, 4), (2, 2), (3, 2)):
        site.exchange.close_step(step, branch=0)
        assert site.exchange.queue("segments").tickets.affinities == known
    assert put_by_affinity(site, 4, affinities=2) == {"env/0": ["env:0@4"], "env/1": ["env:1@4"]}


def test_a_change_of_plan_with_as_many_workers_moves_no_affinity(site):
    put_by_affinity(site, 2, affinities=4)
    for step in (1, 2):
        site.exchange.close_step(step, branch=0)
    site.exchange.replan()
    assert site.exchange.queue("segments").tickets.affinities == 4
    one = UnitInfo(key="env:1@3", branch=0, step=3, inline=b"{}", affinity=1)
    site.told("env/0")
    site.put([one])
    site.exchange.match()
    assert ("assign", ["env:1@3"]) in site.told("env/0"), "as before, though the others are still to be put"


def test_a_ticket_that_still_waits_is_its_own_consumers_again_once_that_is_back(site):
    env_1 = WorkerId("env/1")
    site.exchange.gone(env_1, "env")
    site.exchange.queue("segments").core.consumers.credit(WorkerId("env/0"), 0)
    site.exchange.stand_in(frozenset({env_1}))
    site.exchange.match()
    site.told("env/0"), site.told("env/1")
    site.exchange.queue("segments").core.consumers.credit(env_1, 8)
    site.exchange.stand_in(frozenset())
    site.exchange.match()
    assert ("assign", ["env:1@1"]) in site.told("env/1")


def test_what_is_made_again_goes_to_who_stands_in(site):
    env_1 = WorkerId("env/1")
    site.made("env/1", "env:1@1")
    site.acked("env/1", "segments", "env:1@1")
    site.exchange.stand_in(frozenset({env_1}))
    site.told("env/0")
    site.exchange.gone(env_1, "env")
    site.exchange.match()
    assert site.told("env/0") == [("assign", ["env:1@1"])]


def test_credit_is_what_a_message_can_say_however_large_a_plans_sizes_are():
    assert messages.credit(depth=4, micro_batch=8) == 32
    most = messages.credit(depth=1_000_000, micro_batch=1_000_000_000)
    assert pb.Route(credit=most).credit == pb.Credit(units=most).units == most
    assert messages.window(pb.ChannelSpec(depth=1_000_000, micro_batch=1_000_000_000)) == most


# --- units of no ticket -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", ["the flow", "the unit"])
def test_a_unit_that_its_step_does_not_know_is_the_users_error_and_no_wait_without_end(first):
    site, failed = Site(), list[tuple[str, str]]()
    site.job.fail = lambda reason, message, failure=None: failed.append((reason, message))  # type: ignore[method-assign]
    made = [pb.Unit(key=key, step=1) for key in ("env:0@1", "env:0@1/1", "env:0@1/2")]
    acts = [site.open, lambda: site.exchange.queue("trajectories").announced(made, producer=ENV, after=Age.at(START))]
    for act in acts if first == "the flow" else reversed(acts):
        assert failed == []
        act()
    sentence = (
        "step 1 does not know a unit that worker env/0 put into queue 'trajectories': got key 'env:0@1/1', of ticket "
        "'env:0@1/1', which is none of the step, wanted a unit of what it waits for, such as env:1@1, env:0@1; put it "
        "with parents=[...], what it was made of, or with the ticket's key; where more than one comes of a ticket, the "
        "flow says so: Ticket(..., units=8)"
    )
    assert failed == [("UserError", sentence)]


def test_what_is_of_another_branch_or_step_is_nobodys_error():
    site = Site()
    site.open()
    made = [
        pb.Unit(key="env:7@1", step=1, branch=1, version=pb.PolicyVersion(branch=1)),
        pb.Unit(key="env:7@2", step=2, version=pb.PolicyVersion(number=1)),
    ]
    site.exchange.queue("trajectories").announced(made, producer=ENV, after=Age.at(START))
    assert site.job.ending is False


def test_a_new_driver_gives_nothing_of_a_group_before_it_has_heard_who_has_part_of_it():
    site = Site()
    drafts = QueueSpec(channel="drafts", producer="env", consumer="rollout", together=True)
    site.job.topology = replace(site.job.topology, queues=(SEGMENTS, drafts, TRAJECTORIES))
    site.exchange = Exchange(site.job)
    site.exchange.declare()
    site.exchange.queue("drafts").core.consumers.credit(WorkerId("rollout/0"), 8)
    made = [pb.Unit(key=f"env:0@1/{n}", step=1, tickets=["env:0@1"]) for n in range(2)]
    site.exchange.announced("drafts", made, producer=ENV, after=Age.at(START))
    site.exchange.match()
    assert site.told("rollout/0") == []
    site.job.begun = True
    site.exchange.match()
    assert site.told("rollout/0") == [("assign", ["env:0@1/0", "env:0@1/1"])]


@pytest.mark.parametrize(
    ("made", "got", "wanted"),
    [
        (pb.Unit(key="env:7@2", step=2), "b0-0", "b0-1"),
        (pb.Unit(key="env:7@2", step=2, branch=1, version=pb.PolicyVersion(number=9)), "b0-9", "b1-1"),
    ],
)
def test_a_unit_of_weights_that_are_too_old_for_its_step_ends_the_job_with_a_sentence(made, got, wanted):
    site, failed = Site(), list[tuple[str, str]]()
    site.job.fail = lambda reason, message, failure=None: failed.append((reason, message))  # type: ignore[method-assign]
    site.exchange.announced("trajectories", [made], producer=ENV, after=Age.at(START))
    sentence = (
        "worker env/0: unit 'env:7@2' of channel 'trajectories' is made with weights that are too old for step 2: got "
        f"version {got}, wanted {wanted} or newer, by spec.flow.maxStaleness; make it with await "
        "ctx.weights.pull(ticket.version); where other weights made it, say version=..."
    )
    assert failed == [("UserError", sentence)]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_of_many_units_in_one_message_the_one_that_is_too_old_is_found(at):
    site, failed = Site(), list[str]()
    site.job.fail = lambda reason, message, failure=None: failed.append(message)  # type: ignore[method-assign]
    made = [pb.Unit(key=f"env:{n}@2", step=2, version=pb.PolicyVersion(number=1)) for n in range(3)]
    made[at].version.number = 0
    site.exchange.announced("trajectories", made, producer=ENV, after=Age.at(START))
    assert len(failed) == 1
    assert f"'env:{at}@2'" in failed[0]


def test_how_old_the_weights_of_a_unit_may_be_is_the_jobs_to_say_and_what_has_committed_is_nobodys_error():
    site = Site()
    site.job.ledger.max_staleness = 1
    site.exchange.announced("trajectories", [pb.Unit(key="env:7@2", step=2)], producer=ENV, after=Age.at(START))
    late = [pb.Unit(key="env:7@3", step=3), pb.Unit(key="env:7@9", step=9)]
    site.exchange.announced("trajectories", late, producer=ENV, after=Age(1, 3))
    assert site.job.ending is False


def test_neither_may_a_queue_that_is_joined_have_units_of_no_ticket():
    site, failed = Site(), list[str]()
    parts = QueueSpec(channel="notes", producer="env", consumer="actor", rounds=False, joins="trajectories")
    site.job.topology = replace(site.job.topology, queues=(SEGMENTS, TRAJECTORIES, parts))
    site.exchange = Exchange(site.job)
    site.exchange.declare()
    site.job.fail = lambda reason, message, failure=None: failed.append(message)  # type: ignore[method-assign]
    site.open()
    notes = site.exchange.queue("notes")
    notes.announced([pb.Unit(key="env:0@1", step=1)], producer=ENV, after=Age.at(START))
    assert failed == []
    notes.announced([pb.Unit(key="env:9@1", step=1)], producer=ENV, after=Age.at(START))
    assert [said.partition(":")[0] for said in failed] == [
        "step 1 does not know a unit that worker env/0 put into queue 'notes'"
    ]


def test_what_a_filter_ends_for_one_gang_is_made_again_for_the_other():
    """A judge drops a draft, of which the critic would have had something; the actor's unit of that ticket is lost."""
    drafts = QueueSpec(channel="drafts", producer="env", consumer="rollout")
    values = QueueSpec(channel="values", producer="rollout", consumer="critic", rounds=True)
    site = Site(Topology(queues=(SEGMENTS, TRAJECTORIES, drafts, values)))
    site.exchange.queue("drafts").core.consumers.credit(WorkerId("rollout/0"), 8)
    site.open()
    draft = pb.Unit(key="env:0@1", branch=0, step=1, weight=1)
    site.exchange.queue("drafts").announced([draft], producer=ENV, after=Age(0, 0))
    site.exchange.match()
    site.exchange.dropped(WorkerId("rollout/0"), pb.Drop(channel="drafts", key="env:0@1"))
    critic, actor = (site.exchange.queue(name).core.steps.at(Age(0, 1)) for name in ("values", "trajectories"))
    assert (critic.has_all("env:0@1"), actor.has_all("env:0@1")) == (True, False)
    site.told("env/1")
    site.exchange.gone(ENV, "env")
    site.exchange.stand_in(frozenset({ENV}))
    site.exchange.match()
    assert site.told("env/1") == [("assign", ["env:0@1"])]
    site.exchange.dropped(WorkerId("env/1"), pb.Drop(channel="segments", key="env:0@1"))
    assert actor.has_all("env:0@1"), "a ticket is dropped for all"
    site.told("env/0")
    site.exchange.gone(WorkerId("env/1"), "env")
    site.exchange.stand_in(frozenset())
    site.exchange.match()
    assert "env:0@1" not in [key for _, keys in site.told("env/0") for key in keys]


def test_who_comes_back_with_a_unit_that_nobody_needs_is_told_of_that_one_alone():
    """Another has made what was to come of it meanwhile, or its step has committed."""
    site = Site()
    site.open()
    site.held("env/0", "segments", "env:0@1")
    site.acked("env/0", "segments", "env:0@1")
    site.told("env/1")

    def back(worker: str, *keys: str, after: PolicyVersion = START) -> list[tuple[str, list[str]]]:
        units = [pb.Unit(key=key, branch=0, step=1, weight=1) for key in keys]
        taken = [pb.HeldUnit(channel="segments", unit=unit) for unit in units]
        hello = pb.Hello(worker=worker, taken=taken)
        site.exchange.reconnected(WorkerId(worker), "env", hello, after=after)
        return [said for said in site.told(worker) if said[0] == "cancel"]

    assert back("env/1", "env:0@1", "env:1@1") == [("cancel", ["env:0@1"])]
    assert back("env/0", "env:1@1") == [], "another has it, and has not made it yet"
    assert back("env/0", "env:1@1", after=PolicyVersion(0, 1)) == [("cancel", ["env:1@1"])]
    actor = pb.HeldUnit(channel="trajectories", unit=pb.Unit(key="env:1@1", branch=0, step=1, weight=1))
    hello = pb.Hello(worker="actor/0", taken=[actor])
    site.exchange.reconnected(WorkerId("actor/0"), "actor", hello, after=PolicyVersion(0, 1))
    assert "cancel" not in dict(site.told("actor/0")), "who ends steps keeps its units until it hears of the commit"


@pytest.mark.parametrize("state", ["waiting", "assigned", "held"])
def test_a_ticket_that_the_flow_withdraws_is_not_waited_for_and_its_holder_is_told(state):
    site = Site()
    site.put(site.tickets)
    if state != "waiting":
        site.exchange.match()
        site.told("env/1")
    if state == "held":
        site.held("env/1", "segments", "env:1@1")
    site.exchange.withdraw("segments", [UnitId(0, "env:1@1"), UnitId(0, "env:7@1")])
    site.exchange.match()
    assert site.told("env/1") == ([] if state == "waiting" else [("cancel", ["env:1@1"])])
    site.say_all()
    site.made("env/1", "env:1@1")  # too late: it was on its way
    assert site.told("env/1")[-1:] == [("released", ["env:1@1"])]
    site.made("env/0", "env:0@1")
    rounds = [keys for kind, keys in site.told("actor/0") if kind == "round"]
    assert rounds == [["env:0@1"]], "all of the step"
    taken = [pb.HeldUnit(channel="segments", unit=pb.Unit(key="env:1@1", step=1, weight=1))]
    site.exchange.reconnected(WorkerId("env/1"), "env", pb.Hello(worker="env/1", taken=taken), after=START)
    assert site.told("env/1")[0] == ("cancel", ["env:1@1"]), "who has not heard of it"
    site.exchange.gone(WorkerId("env/1"), "env")
    site.exchange.withdraw("segments", [UnitId(0, "env:1@1")])
    site.exchange.match()
    assert site.exchange.queue("segments").core.counts["dropped"] == 1, "told again, nothing changes"


def test_a_ticket_of_which_something_has_come_is_not_withdrawn():
    site = Site()
    site.open()
    site.held("env/1", "segments", "env:1@1")
    site.made("env/1", "env:1@1")
    site.told("env/1")
    site.exchange.withdraw("segments", [UnitId(0, "env:1@1")])
    assert site.told("env/1") == []
    assert site.exchange.queue("segments").core.counts["dropped"] == 0
