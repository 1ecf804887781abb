"""Models of the three roles of ppo for tests.fakes.driver_world: what a worker takes, makes and commits, no more."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels import messages
from rlinf_worker.channels.protocol import Item, PolicyVersion, Round
from rlinf_worker.cycles.answerer import Question
from rlinf_worker.queues.units import Age
from tests.fakes.driver_workers import SimWorker
from tests.fakes.memory_links import at_once, is_waiting, resume

if TYPE_CHECKING:
    pass


ONE = np.zeros((1, 1), np.float32)
NUMBERS = np.zeros(1, np.int64)
NEVER = np.zeros((1, 1), np.bool_)


def mark_of(key: str) -> list[list[int]]:
    mark = zlib.crc32(key.encode())
    return [[mark >> 16, mark & 0xFFFF]]


def trajectory(key: str) -> dict[str, Any]:
    """As flow ppo declares it; only `final_index` says whose it is."""
    return {
        "obs": ONE,
        "action": ONE,
        "logprob": ONE,
        "reward": ONE,
        "terminated": NEVER,
        "truncated": NEVER,
        "last_obs": ONE,
        "final_index": np.array(mark_of(key), np.int32),
        "final_obs": ONE,
        "episode_returns": np.zeros(0),
    }


class SimEnv(SimWorker):
    consumes, produces = "segments", "trajectories"

    def load(self) -> None:
        self.waiting: list[Item] = []
        self.puts: list[tuple[list[Item], deque[Any]]] = []  # what was taken, and calls of `put` that wait for room
        self.asked = 0
        self.unanswered_questions: set[int] = set()
        super().load()

    def work(self) -> None:
        self.hear_answers()
        while self.begun is not None and (ticket := self.queues[self.consumes].take_now()) is not None:
            self.waiting.append(ticket)
            self.doing.append(self.collect)

    def on_time(self) -> None:
        super().on_time()
        if getattr(self, "waiting", None) and self.collect not in self.doing:
            self.doing.append(self.collect)

    def collect(self) -> None:
        """With a rollout that has weights which are new enough; without, it is tried again at the next tick."""
        have, tickets = self.world.rollout_version(), self.queues[self.consumes]
        self.ask()
        for ticket in list(self.waiting):
            if ticket.cancelled:
                self.waiting.remove(ticket)
                tickets.drop(ticket, "cancelled")
            elif self.world.filters(ticket.key, channel=self.consumes):
                self.waiting.remove(ticket)
                tickets.drop(ticket, "too easy")
            elif have is not None and have >= ticket.version:
                together = self.world.together(ticket, self.waiting)
                if together:
                    self.waiting = [item for item in self.waiting if item not in together]
                    keys = self.world.made_of(self, together)
                    puts = deque(self.put(name, key, together, have) for key in keys for name in self.channels)
                    if (told := self.world.told_of(self, together, keys)) is not None:
                        scores = self.queues["scores"]
                        puts.append(scores.put(told, key=together[0].key, version=have, parents=together))
                    self.puts.append((together, puts))
        self.go_on()

    @property
    def channels(self) -> tuple[str, ...]:
        """Into which it puts each unit."""
        return (self.produces,)

    def put(self, channel: str, key: str, parents: list[Item], have: PolicyVersion) -> Any:
        return self.queues[channel].put(trajectory(key), key=key, version=have, weight=4.0, parents=parents)

    def go_on(self) -> None:
        puts, self.puts = getattr(self, "puts", []), []
        for tickets, calls in puts:
            while calls and not is_waiting(resume(calls[0])):
                calls.popleft()
                self.let_in(Age(tickets[0].branch, tickets[0].step))
            if calls:
                self.puts.append((tickets, calls))
                self.world.held_back.add((self.life, tickets[0].key))
                continue
            for ticket in tickets:
                if self.world.is_dropped(self, ticket):
                    self.queues[self.consumes].drop(ticket, "nothing to learn from")
                else:
                    self.queues[self.consumes].ack(ticket)

    def let_in(self, age: Age) -> None:
        """The bound of each open step, but for the oldest there is: that one has to get in whole."""
        for shelf in (self.queues[name].out.shelf for name in self.channels):
            kept = [unit.age for unit in shelf.units()]
            assert kept.count(age) <= shelf.capacity_units or age == min(kept), (self.id, kept)

    def ask(self) -> None:
        """A rollout: each question is answered once, and nothing else depends on it."""
        actions = self.askers.get("actions")
        if actions is not None and actions._find("") is not None:
            self.asked += 1
            self.unanswered_questions.add(self.asked)
            at_once(actions.ask({"obs": ONE, "slice": 0, "t": self.asked}, key=str(self.asked), step=1))
            self.world.asked_first_in[self.life, self.asked] = next(
                end.asked.number for end in actions._with.values()
                if str(self.asked) in [question.key for question in end.asked.unanswered]
            )  # fmt: skip

    def hear_answers(self) -> None:
        actions = self.askers.get("actions")
        while actions is not None and (answer := actions.take_now()) is not None:
            self.unanswered_questions.remove(int(answer.key))  # once: a second is an error here


class SimRollout(SimWorker):
    consumes = ""

    def work(self) -> None:
        if self.begun is None or (actions := self.answerers.get("actions")) is None:
            return
        while (item := actions.take_now()) is not None:
            assert isinstance(item, Question)
            conversation = item.conversation
            asker = (str(item.source), conversation.peer.attempt)
            heard = self.world.heard.setdefault((self.life, asker, conversation.number), [])
            heard.append(item.payload["t"])
            actions.answer(item, {"action": NUMBERS, "logprob": ONE[0]})


class SimActor(SimWorker):
    consumes, produces = "trajectories", ""

    def load(self) -> None:
        self.items: list[Item] = []
        self.updating: tuple[int, int] | None = None  # (branch, step) told done
        if self.size > 1 or self.has_others:
            self.unanswered["join"] = pb.WorkerMessage(join=pb.Join())
            self.tell(join=self.unanswered["join"].join)
        else:
            self.restore()

    def on_roster(self, roster: pb.Roster) -> None:
        if self.unanswered.pop("join", None) is not None:
            self.restore()

    def restore(self) -> None:
        self.say_ready(max(self.world.checkpoints, key=lambda v: v.number, default=None))

    def on_begin(self, begin: pb.Begin) -> None:
        if "ready" in self.unanswered:
            self.published = messages.version_from_pb(begin.version)
        super().on_begin(begin)

    def work(self) -> None:
        queue = self.queues.get(self.consumes)
        while queue is not None and self.begun is not None and self.updating is None and queue.into.given.has_next():
            part: Round = at_once(queue.take_round())
            assert self.committed is not None
            if (part.branch, part.step) <= (self.committed.branch, self.committed.number):
                self.leave(part.items)
                continue
            mine = [u for u in self.items if (u.branch, u.step) == (part.branch, part.step)]
            self.leave([u for u in self.items if u not in mine])
            filtered = [u for u in part.items if self.world.filters(u.key, channel=self.consumes)]
            for unit in filtered:
                queue.drop(unit, "too short")
            self.items = [*mine, *(u for u in part.items if u not in filtered)]
            if part.last:
                self.updating = (part.branch, part.step)
                self.doing.append(self.update)

    def leave(self, items: Iterable[Item]) -> None:
        for item in items:
            self.queues[self.consumes].drop(item, "of another branch")

    def update(self) -> None:
        """Every unit is of the very weights that are trained: the job has no staleness, or within its bound."""
        assert self.updating is not None
        branch, step = self.updating
        bound = self.world.driver.job.ledger.max_staleness
        for unit in self.items:
            assert unit.payload["final_index"].tolist() == mark_of(unit.key), "the payload of this very unit"
            assert unit.version.branch == branch, f"{unit} trains branch {branch}"
            assert step - 1 - bound <= unit.version.number <= step - 1, f"{unit} trains step {step}"
        keys = [u.key for u in self.items]
        done = pb.StepDone(step=step, branch=branch, rank=self.rank, keys=keys, metrics_json='{"loss": 0.5}')
        done.ended.extend(self.queues[self.consumes].into.ended.take(step, branch=branch))
        done.highest_driver_attempt = self.driver_attempt
        self.steps_done[step] = done
        self.tell(step_done=done)

    def on_welcome(self, welcome: pb.Welcome) -> None:
        self.has_others = len(welcome.gangs) > 1
        super().on_welcome(welcome)

    def on_step_commit(self, commit: pb.StepCommit) -> None:
        if self.steps_done.pop(commit.step, None) is None:
            return
        assert self.updating is not None
        self.committed, self.last_commit = messages.version_from_pb(commit.version), commit
        self.published = self.committed
        if self.rank == 0:
            ranks = [w for w in self.world.workers.values() if isinstance(w, SimActor) and w.role == self.role]
            keys = [u.key for rank in ranks for u in rank.items_of(commit.step)]
            self.world.has_committed(self.role, self.committed, keys)
            if commit.checkpoint:
                self.world.save(self, commit)
        self.trained = {commit.step: list(self.items)}
        for unit in self.items:
            self.queues[self.consumes].ack(unit)
        self.items, self.updating = [], None
        self.work()

    def items_of(self, step: int) -> list[Item]:
        kept = getattr(self, "trained", {}).get(step, [])
        return [*kept, *(u for u in self.items if u.step == step)]


ROLES: dict[str, type[SimWorker]] = {"env": SimEnv, "rollout": SimRollout, "actor": SimActor}
