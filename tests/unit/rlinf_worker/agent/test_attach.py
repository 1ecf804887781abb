"""The agent's end of its uplink: what outlives a stream, heartbeats, and the words with which an agent ends."""

import asyncio
from dataclasses import replace
from time import monotonic
from typing import Any

import grpc
import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2 as pb
from rlinf_api.errors import Refused, UserError
from rlinf_api.report import Failure
from rlinf_worker.agent import attach
from rlinf_worker.agent.attach import Attachment
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.instructions import Book
from rlinf_worker.settings import Settings
from rlinf_worker.uplink.dialling import DriverAbsent, RefusedByDriver
from rlinf_worker.uplink.outbox import Lasts

PROGRESS = pb.Progress(worker="env/0", phase="step", deadline_s=20.0)
SETTINGS = Settings(heartbeat_interval_s=0.002, agent_dead_after_s=9.0, outbox_messages=5)


class Holdings:
    def __init__(self) -> None:
        self.instructions: list[pb.Instruction] = []

    def hello(self, *, highest_driver_attempt: int) -> pb.Hello:
        return pb.Hello(pod="p", highest_driver_attempt=highest_driver_attempt)

    def progress(self) -> list[pb.Progress]:
        return [PROGRESS]

    def instructed(self, instruction: pb.Instruction) -> None:
        self.instructions.append(instruction)


class Line:
    """Plays the uplink."""

    def __init__(self) -> None:
        self.is_connected = False
        self.told: list[tuple[pb.AgentMessage, Lasts]] = []
        self.kept: dict[str, pb.AgentMessage] = {}
        self.ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self, message: pb.AgentMessage, *, lasts: Lasts = Lasts.STREAM) -> None:
        self.told.append((message, lasts))

    def repeat(self, key: str, message: pb.AgentMessage) -> None:
        self.kept[key] = message

    def forget(self, key: str) -> None:
        self.kept.pop(key, None)

    async def run(self) -> None:
        await self.ends

    @property
    def beats(self) -> list[pb.Heartbeat]:
        return [message.heartbeat for message, _ in self.told if message.WhichOneof("kind") == "heartbeat"]


@pytest.fixture
def identity(tmp_path):
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (tmp_path / name).write_text(name)
    return PodIdentity(
        job_uid="job-1", pod="math-sim-0", pod_ip="127.0.0.1", node="node-5", pool="sim", ordinal=0, attempt=1, slots=2,
        driver_address="driver:7070", run_dir=str(tmp_path), tls_dir=str(tmp_path), output_dir="", worker_log_dir="",
        termination_log="",
    )  # fmt: skip


def made(identity, settings=SETTINGS) -> Any:
    """(attachment, line, holdings, book)."""
    holdings, book = Holdings(), Book(keep=3)
    attachment = Attachment(identity, settings, holdings=holdings, book=book, clock=monotonic)
    attachment.uplink = line = Line()  # type: ignore[assignment]
    return attachment, line, holdings, book


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_the_uplink_is_told_who_dials_whom_and_for_how_long(identity, monkeypatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(attach, "Uplink", lambda part, **options: given.update(options, part=part))
    monkeypatch.setattr(attach, "to_driver", lambda address, *, tls, job_uid: (address, tls.folder, job_uid))
    attachment = Attachment(identity, SETTINGS, holdings=Holdings(), book=Book(keep=3), clock=monotonic)
    assert given == {
        "part": attachment, "wire": attach.DIALECT, "who": "pod math-sim-0", "address": "driver:7070",
        "dial": ("driver:7070", attachment._tls.folder, "job-1"), "settings": SETTINGS, "write_timeout_s": 9.0,
        "kept": 5, "clock": monotonic,
    }  # fmt: skip
    assert str(attachment._tls.folder) == identity.tls_dir


def test_a_frame_is_one_message():
    message = pb.AgentMessage(heartbeat=pb.Heartbeat(sequence=1))
    dialect = attach.DIALECT
    assert (dialect.pack([message]), dialect.frame_messages) == (message, 1)
    assert list(dialect.unpack(pb.DriverMessage())) == [pb.DriverMessage()]


@pytest.mark.parametrize(
    ("message", "lasts"),
    [
        (pb.AgentMessage(hung=pb.WorkerHung(worker="env/0")), Lasts.JOB),
        (pb.AgentMessage(result=pb.Result(instruction_id=1)), Lasts.DRIVER),
        (pb.AgentMessage(turn=pb.WorkerTurn(worker="env/0")), Lasts.STREAM),
        (pb.AgentMessage(notice=pb.Notice(kind="turns")), Lasts.STREAM),
        (pb.AgentMessage(), Lasts.STREAM),
    ],
)
async def test_each_word_lasts_as_long_as_somebody_needs_it(identity, message, lasts):
    attachment, line, _, _ = made(identity)
    attachment.tell(message)
    assert line.told == [(message, lasts)]


async def test_an_exit_is_said_to_every_driver_until_the_worker_runs_again(identity):
    attachment, line, _, _ = made(identity)
    said = {worker: pb.WorkerExited(worker=worker, attempt=2, exit_code=137) for worker in ("env/0", "env/1")}
    for exited in said.values():
        attachment.exited(exited)
    assert line.kept == {worker: pb.AgentMessage(exited=exited) for worker, exited in said.items()}
    attachment.started("env/0")
    assert set(line.kept) == {"env/1"}


async def test_the_hello_is_what_the_agent_holds(identity):
    attachment, *_ = made(identity)
    wanted = pb.AgentMessage(hello=pb.Hello(pod="p", highest_driver_attempt=4))
    assert attachment.hello(highest_driver_attempt=4) == wanted


async def test_instructions_are_passed_on_and_nothing_else(identity):
    attachment, _, holdings, _ = made(identity)
    instruction = pb.Instruction(id=1, stop=pb.Stop(worker="env/0"))
    for message in (pb.DriverMessage(), pb.DriverMessage(instruction=instruction)):
        attachment.on_message(message)
    assert holdings.instructions == [instruction]


# --- heartbeats -------------------------------------------------------------------------------------------------------
async def test_beats_are_numbered_carry_the_progress_and_wait_for_a_driver(identity):
    attachment, line, _, _ = made(identity)
    running = asyncio.create_task(attachment.run())
    await asyncio.sleep(0.02)
    assert (line.beats, attachment.heartbeats) == ([], 0)
    line.is_connected = True
    await until(lambda: len(line.beats) >= 3)
    assert line.beats[:2] == [pb.Heartbeat(sequence=n, progress=[PROGRESS]) for n in (1, 2)]
    assert {lasts for _, lasts in line.told} == {Lasts.STREAM}
    line.ends.set_result(None)
    await running
    count = len(line.beats)
    assert attachment.heartbeats == count
    await asyncio.sleep(0.01)
    assert len(line.beats) == count, "with the stream the beats end"


async def test_a_welcome_is_answered_by_one_beat_at_once(identity):
    attachment, line, _, book = made(identity, replace(SETTINGS, heartbeat_interval_s=50.0))
    running = asyncio.create_task(attachment.run())
    line.is_connected = True
    await asyncio.sleep(0.01)
    assert line.beats == []
    attachment.on_welcome(pb.Welcome(driver_attempt=3), is_new_driver=False)
    await until(lambda: line.beats)
    await asyncio.sleep(0.01)
    assert (len(line.beats), book.highest) == (1, 3)
    line.ends.set_result(None)
    await running


@pytest.mark.parametrize(
    ("named", "kept"), [(0.0, 0.5), (-1.0, 0.5), (1e-9, 0.02), (0.02, 0.02), (1.0, 1.0), (10.0, 10.0), (1e9, 10.0)]
)
async def test_the_driver_names_the_interval_within_bounds(identity, named, kept):
    attachment, *_ = made(identity, replace(SETTINGS, heartbeat_interval_s=0.5))
    attachment.on_welcome(pb.Welcome(driver_attempt=1, heartbeat_interval_s=named), is_new_driver=False)
    assert attachment._beat_s == kept


# --- the end ----------------------------------------------------------------------------------------------------------
def refused(code: int) -> RefusedByDriver:
    return RefusedByDriver("all is done", who="pod math-sim-0", exit_code=code)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (None, Failure(exit_code=names.EXIT_OK, reason="Closed")),
        (refused(names.EXIT_OK), Failure(exit_code=names.EXIT_OK, reason="Finished", message="all is done")),
        (refused(names.EXIT_STALE), Failure(exit_code=names.EXIT_STALE, reason="Stale", message="all is done")),
        (refused(names.EXIT_BUG), Failure(exit_code=names.EXIT_BUG, reason="Refused", message="all is done")),
        (Refused("no"), Failure(exit_code=names.EXIT_USER_ERROR, reason="Refused", message="no")),
        (DriverAbsent("nobody"), Failure(exit_code=names.EXIT_RETRYABLE, reason="DriverAbsent", message="nobody")),
    ],
)  # fmt: skip
async def test_an_agent_ends_with_its_drivers_words_and_says_where(identity, error, wanted):
    attachment, line, _, _ = made(identity)
    if error is None:
        line.ends.set_result(None)
    else:
        line.ends.set_exception(error)
    assert await attachment.run() == replace(wanted, pod="math-sim-0", node="node-5")


async def test_what_is_no_word_of_a_driver_is_a_bug_and_raised(identity):
    attachment, line, _, _ = made(identity)
    line.ends.set_exception(grpc.RpcError("a bug"))
    with pytest.raises(grpc.RpcError):
        await attachment.run()


async def test_a_missing_secret_is_said_at_once(identity, tmp_path):
    (tmp_path / "tls.key").unlink()
    attachment, *_ = made(identity)
    with pytest.raises(UserError, match="certificates cannot be read"):
        await asyncio.wait_for(attachment.run(), 10)
