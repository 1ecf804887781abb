"""A worker is started on slots that its pod has, and on no other."""

from pathlib import Path

import pytest

from rlinf_api import names
from rlinf_api.errors import RetryableError, UserError
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.agent.supervisor import Supervisor
from rlinf_worker.clock import Clock
from rlinf_worker.settings import Settings


class Nobody:
    def __getattr__(self, _name):
        return lambda *_, **__: None


def supervisor(folder: Path) -> Supervisor:
    environ = {
        names.ENV_JOB_UID: "u1", names.ENV_POD_UID: "p1", names.ENV_POD_NAME: "math-sim-0",
        names.ENV_POD_IP: "127.0.0.1", names.ENV_POOL: "sim", names.ENV_ORDINAL: "0", names.ENV_ATTEMPT: "1",
        names.ENV_SLOTS: "2", names.ENV_DRIVER_ADDRESS: "127.0.0.1:1", names.ENV_RUN_DIR: str(folder),
        names.ENV_WORKER_LOG_DIR: str(folder),
    }  # fmt: skip
    identity = PodIdentity.read(environ)
    settings = Settings(watch_interval_s=0.005, stacks_timeout_s=0.05)
    return Supervisor(
        identity, settings, listener=Nobody(), order=lambda *_: False, environ={}, mark="m", command=("sleep", "60"),
        clock=Clock(notice_s=1.0),
    )  # fmt: skip


def start(*slots: int) -> Start:
    return Start(worker="env/0", role="env", kind="fake", attempt=1, slots=slots)


@pytest.mark.parametrize(("slots", "bad"), [((-1,), "-1"), ((2,), "2"), ((0, 1, 2, -3), "2, -3")])
async def test_a_slot_that_the_pod_does_not_have_is_refused_by_number(tmp_path, slots, bad):
    made = supervisor(tmp_path)
    with pytest.raises(UserError, match=f"pod math-sim-0 does not have: got {bad}, wanted 0 to 1"):
        await made.start(start(*slots))
    assert made.held() == []


async def test_its_first_and_its_last_slot_may_be_used_until_it_ends(tmp_path):
    made = supervisor(tmp_path)
    await made.start(start(0, 1))
    assert [held.id for held in made.held()] == ["env/0"]
    made.kill_all()
    await made.stop_all(reason="the test ends", grace_s=0.0)
    with pytest.raises(RetryableError, match="worker env/0 cannot start here: got this pod ends: the test ends"):
        await made.start(start(0))
