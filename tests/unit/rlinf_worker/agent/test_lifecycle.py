"""The life of a worker as a state machine: its rules one by one, and what holds after any sequence of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_api.errors import InvariantBroken
from rlinf_api.report import Failure
from rlinf_worker.agent import lifecycle as lc
from rlinf_worker.agent.lifecycle import Stage, WorkerLife


def start(attempt=1):
    return lc.Start(worker="env/0", role="env", kind="fake", attempt=attempt)


def after(*events, worker=None):
    """(worker, all instructions) after these events."""
    worker = worker or WorkerLife(id="env/0")
    said: list[lc.Instruction] = []
    for event in events:
        worker, instructions = event.apply(worker)
        said += instructions
    return worker, said


RUNNING = (lc.StartAsked(start()), lc.Spawned(10, 0.0, 60.0), lc.WorkerJoined(1.0))


def test_a_start_spawns_once():
    worker, said = after(lc.StartAsked(start()), lc.StartAsked(start()))
    assert said == [lc.Spawn(start())]
    assert worker.stage is Stage.SPAWNING


def test_an_exit_is_said_only_when_the_tree_is_gone():
    worker, said = after(*RUNNING, lc.Exited(137))
    assert said[-1] == lc.KillTree()
    worker, said = after(lc.TreeGone(), worker=worker)
    assert said == [lc.SayExited(1, 137, False, "", None, ())]
    assert worker.stage is Stage.ABSENT


def test_a_worker_that_is_not_there_has_no_pid():
    assert WorkerLife(id="env/0").pid == 0
    assert after(*RUNNING)[0].pid == 10
    assert after(*RUNNING, lc.Exited(137), lc.TreeGone())[0].pid == 0


def test_the_tree_may_be_gone_before_its_leader_is_reaped():
    worker, said = after(*RUNNING, lc.StopAsked("x", 0.0, 1.0), lc.TreeGone())
    assert worker.stage is Stage.KILLING
    worker, said = after(lc.Exited(137), worker=worker)
    assert said == [lc.SayExited(1, 137, True, "", None, ())]


def test_a_stop_is_an_order_then_a_kill_after_the_grace():
    worker, said = after(*RUNNING, lc.StopAsked("drain", 5.0, 10.0))
    assert said[-1] == lc.OrderStop("drain", 5.0)
    assert after(lc.Ticked(14.9), worker=worker)[1] == []
    assert after(lc.Ticked(15.0), worker=worker)[1] == [lc.KillTree()]


def test_one_that_has_not_joined_is_terminated_and_told_when_it_joins():
    worker, said = after(*RUNNING[:2], lc.StopAsked("drain", 5.0, 10.0))
    assert said[-1] == lc.Terminate()
    assert after(lc.WorkerJoined(12.0), worker=worker)[1] == [lc.OrderStop("stop", 3.0)]


def test_a_shorter_grace_wins():
    worker, _ = after(*RUNNING, lc.StopAsked("drain", 50.0, 10.0), lc.StopAsked("now", 1.0, 11.0))
    assert worker.kill_at == 12.0
    worker, _ = after(lc.StopAsked("later", 90.0, 11.0), worker=worker)
    assert worker.kill_at == 12.0


def test_silence_beyond_the_deadline_takes_stacks_says_hung_and_kills():
    worker, _ = after(*RUNNING, lc.Marked("step", 20.0, 100.0, 100.0))
    assert after(lc.Ticked(120.0), worker=worker)[1] == []
    worker, said = after(lc.Ticked(120.5), worker=worker)
    assert said == [lc.TakeStacks()]
    worker, said = after(lc.StacksTaken("File x, line 3"), worker=worker)
    assert said == [lc.SayHung(1, "step", 20.5, "File x, line 3"), lc.KillTree()]
    _, said = after(lc.Exited(137), lc.TreeGone(), worker=worker)
    assert said[0].hung == "no progress mark for 20.5 s in phase 'step', whose deadline is 20 s"


def test_a_deadline_of_zero_is_none():
    worker, _ = after(*RUNNING, lc.Marked("ready", 0.0, 1.0, 1.0))
    assert after(lc.Ticked(1e9), worker=worker)[1] == []


def test_a_phase_that_was_declared_and_never_told_is_news():
    """The message of it never left, as the loop was blocked at once; it stands in the worker's file."""
    worker, _ = after(*RUNNING, lc.Marked("step", 20.0, 100.0, 100.0))
    assert not lc.is_news(worker, 100.0)
    assert lc.is_news(worker, 100.3)
    worker, _ = after(lc.Marked("load", 300.0, 100.3, 100.3), worker=worker)
    assert after(lc.Ticked(400.0), worker=worker)[1] == []
    assert after(lc.Ticked(401.0), worker=worker)[1] == [lc.TakeStacks()]


def test_a_later_attempt_waits_for_the_end_of_the_earlier():
    worker, said = after(*RUNNING, lc.StartAsked(start(2)), lc.StartAsked(start(3)))
    assert said[-1] == lc.KillTree()
    _, said = after(lc.Exited(137), lc.TreeGone(), worker=worker)
    assert said == [lc.SayExited(1, 137, True, "", None, ()), lc.Spawn(start(3))]


def test_a_stop_forgets_the_attempt_that_was_to_come():
    worker, _ = after(*RUNNING, lc.StartAsked(start(2)), lc.StopAsked("enough", 0.0, 5.0))
    _, said = after(lc.Exited(137), lc.TreeGone(), worker=worker)
    assert len(said) == 1


def test_one_that_is_to_stop_before_it_runs_is_killed_as_soon_as_it_does():
    _, said = after(lc.StartAsked(start()), lc.StopAsked("x", 5.0, 1.0), lc.Spawned(10, 2.0, 60.0))
    assert said[-1] == lc.KillTree()


def test_one_that_is_to_stop_while_its_stacks_are_taken_has_ended_because_it_was_asked():
    worker, _ = after(*RUNNING, lc.Marked("step", 20.0, 100.0, 100.0), lc.Ticked(121.0), lc.StopAsked("x", 5.0, 121.0))
    _, said = after(lc.StacksTaken(""), lc.Exited(137), lc.TreeGone(), worker=worker)
    hung = "no progress mark for 21.0 s in phase 'step', whose deadline is 20 s"
    assert said[-1] == lc.SayExited(1, 137, True, hung, None, ())


IN_STAGE = {
    Stage.ABSENT: (),
    Stage.SPAWNING: RUNNING[:1],
    Stage.RUNNING: RUNNING,
    Stage.STOPPING: (*RUNNING, lc.StopAsked("drain", 5.0, 10.0)),
    Stage.DUMPING: (*RUNNING, lc.Marked("step", 20.0, 100.0, 100.0), lc.Ticked(120.5)),
    Stage.KILLING: (*RUNNING, lc.StopAsked("now", 0.0, 10.0)),
    Stage.CLEARING: (*RUNNING, lc.Exited(1)),
}
AT_WORK = {Stage.RUNNING, Stage.STOPPING}


@pytest.mark.parametrize(
    ("event", "stages"),
    [
        (lc.SpawnFailed("no room"), {Stage.SPAWNING}),
        (lc.WorkerJoined(7.0), AT_WORK),
        (lc.Marked("load", 30.0, 7.0, 7.0), AT_WORK),
        (lc.Spoke(Failure(reason="UserError", message="no")), set(Stage) - {Stage.ABSENT}),
        (lc.StopAsked("now", 1.0, 6.0), set(Stage) - {Stage.ABSENT, Stage.KILLING, Stage.CLEARING}),
        (lc.Promoted(), {Stage.RUNNING}),
        (lc.Condemned("it is silent"), AT_WORK),
        (lc.StacksTaken("File x"), {Stage.DUMPING}),
        (lc.Exited(3), {Stage.RUNNING, Stage.STOPPING, Stage.DUMPING, Stage.KILLING}),
        (lc.TreeGone(("41",)), {Stage.KILLING, Stage.CLEARING}),
        (lc.Ticked(1e9), AT_WORK),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_event_that_means_nothing_in_a_stage_changes_nothing(event, stages):
    for stage, events in IN_STAGE.items():
        worker, _ = after(*events)
        assert worker.stage is stage
        assert (after(event, worker=worker) != (worker, [])) is (stage in stages), stage


@pytest.mark.parametrize(("attempt", "ok"), [(1, False), (2, True), (3, True)])
def test_a_start_that_may_not_be_says_why(attempt, ok):
    worker, _ = after(lc.StartAsked(start(2)), lc.Spawned(10, 0.0, 60.0))
    refused = lc.refusal(worker, start(attempt))
    assert (refused == "") is ok
    if not ok:
        assert refused.startswith("worker env/0 cannot start: got attempt 1, wanted more than 2, which is running")


def test_an_attempt_that_ended_is_not_started_again():
    worker, _ = after(*RUNNING, lc.Exited(0), lc.TreeGone())
    assert lc.refusal(worker, start(1)).endswith("which has been here; take the next number")
    assert lc.refusal(worker, start(2)) == ""


def test_an_exit_with_zero_that_nobody_asked_for_is_none_that_was_asked_and_words_come_along():
    words = Failure(reason="X", message="y")
    _, said = after(*RUNNING, lc.Spoke(words), lc.Exited(0), lc.TreeGone(("x (pid 9) is in D",)))
    assert said[-1] == lc.SayExited(1, 0, False, "", words, ("x (pid 9) is in D",))


def test_a_process_that_cannot_be_made_is_said():
    worker, said = after(lc.StartAsked(start()), lc.SpawnFailed("no memory"))
    assert said[-1].failed_to_start == "no memory"
    assert worker.stage is Stage.ABSENT
    assert lc.refusal(worker, start(2)) == ""


def test_a_process_that_nobody_asked_for_is_a_bug():
    with pytest.raises(InvariantBroken, match="nobody asked for"):
        after(lc.Spawned(10, 0.0, 1.0))


class World:
    """What a supervisor would do, with the answers to instructions in any order and late."""

    def __init__(self):
        self.worker = WorkerLife(id="env/0")
        self.now = 0.0
        self.process = None  # attempt of the living leader
        self.tree = None  # attempt whose tree is not known to be gone
        self.killing = False
        self.dumping = False
        self.spawned, self.told, self.hung = [], [], []

    def feed(self, event):
        self.worker, instructions = event.apply(self.worker)
        for instruction in instructions:
            self.run(instruction)

    def run(self, instruction):
        match instruction:
            case lc.Spawn(s):
                assert self.process is None, "two processes of one worker"
                assert self.tree is None, "started beside what the last attempt left"
                assert s.attempt not in self.spawned
                assert all(s.attempt > earlier for earlier in self.spawned), "attempts only grow"
                self.spawned.append(s.attempt)
                self.process = self.tree = s.attempt
                self.killing = self.dumping = False
                self.feed(lc.Spawned(100 + s.attempt, self.now, 60.0))
            case lc.KillTree():
                assert not self.killing, "killed twice"
                assert self.tree is not None
                self.killing = True
            case lc.TakeStacks():
                assert not self.dumping
                self.dumping = True
            case lc.SayHung():
                assert self.told == self.spawned[:-1]
                self.hung.append(instruction.attempt)
            case lc.SayExited():
                assert self.process is None, "an exit was told of a process that lives"
                assert self.tree is None, "an exit was told before the tree was gone"
                self.told.append(instruction.attempt)

    def exit(self, code):
        if self.process is not None:
            self.process = None
            self.feed(lc.Exited(code))

    def clear(self):
        if self.killing and self.tree is not None:
            self.killing = False
            self.tree = None
            leader_died, self.process = self.process is not None, None
            self.feed(lc.TreeGone())
            if leader_died:
                self.feed(lc.Exited(137))


ACTIONS = st.one_of(
    st.tuples(st.just("start"), st.integers(1, 6)),
    st.tuples(st.just("stop"), st.sampled_from([0.0, 1.0, 30.0])),
    st.tuples(st.just("exit"), st.sampled_from([0, 1, 137])),
    st.tuples(st.just("mark"), st.sampled_from([0.0, 1.0, 30.0])),
    st.tuples(st.just("tick"), st.sampled_from([0.1, 1.5, 40.0])),
    st.tuples(st.sampled_from(["join", "clear", "stacks", "spoke"]), st.none()),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_whatever_happens_each_attempt_ends_once_and_never_two_live(actions):
    world = World()
    for name, value in actions:
        match name:
            case "start":
                world.feed(lc.StartAsked(start(value)))
            case "stop":
                world.feed(lc.StopAsked("x", value, world.now))
            case "exit":
                world.exit(value)
            case "mark":
                world.feed(lc.Marked("step", value, world.now, world.now))
            case "tick":
                world.now += value
                world.feed(lc.Ticked(world.now))
            case "join":
                world.feed(lc.WorkerJoined(world.now))
            case "clear":
                world.clear()
            case "stacks":
                if world.dumping:
                    world.dumping = False
                    world.feed(lc.StacksTaken("..."))
            case "spoke":
                world.feed(lc.Spoke(Failure(message="bye")))
        assert world.told == world.spawned[: len(world.told)]
    # A stop ends it, whatever came before, when the world answers.
    world.feed(lc.StopAsked("end", 1.0, world.now))
    for _ in range(4):
        world.now += 100.0
        world.feed(lc.Ticked(world.now))
        if world.dumping:
            world.dumping = False
            world.feed(lc.StacksTaken(""))
        world.clear()
    assert world.worker.stage is Stage.ABSENT
    assert world.told == world.spawned


SPARE = lc.Start(worker="spare.env/0", role="env", kind="fake", attempt=3, spare=True)


def warm_spare():
    worker, _ = after(
        lc.StartAsked(SPARE), lc.Spawned(10, 0.0, 60.0), lc.WorkerJoined(1.0), worker=WorkerLife(id="spare.env/0")
    )
    return worker


def test_a_promoted_spare_is_gone_without_an_exit_and_its_next_life_has_a_higher_number():
    worker, said = after(lc.Promoted(), worker=warm_spare())
    assert (worker.stage, said) == (Stage.ABSENT, [])
    assert lc.refusal(worker, SPARE)
    assert after(lc.Exited(0), lc.Marked("idle", 20.0, 2.0, 2.0), lc.Ticked(1000.0), worker=worker) == (worker, [])
    later = lc.Start(worker="spare.env/0", role="env", kind="fake", attempt=4, spare=True)
    assert after(lc.StartAsked(later), worker=worker)[1] == [lc.Spawn(later)]


def test_only_a_joined_spare_of_the_same_role_and_kind_becomes_a_worker():
    place = lc.Start(worker="env/0", role="env", kind="fake", attempt=2, from_spare="spare.env/0")
    assert lc.may_become(warm_spare(), place)
    not_joined = after(lc.StartAsked(SPARE), lc.Spawned(10, 0.0, 60.0), worker=WorkerLife(id="spare.env/0"))[0]
    assert not lc.may_become(not_joined, place)
    assert not lc.may_become(after(lc.StopAsked("x", 5.0, 2.0), worker=warm_spare())[0], place)
    assert not lc.may_become(after(*RUNNING)[0], place), "a worker is no spare"
    assert not lc.may_become(warm_spare(), lc.Start(worker="env/0", role="env", kind="other", attempt=2))
