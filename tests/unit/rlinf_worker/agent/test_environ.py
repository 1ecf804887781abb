"""What a worker finds in its environment besides its agent's."""

from pathlib import Path

import pytest

from rlinf_worker.agent import process
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.weights import copying


@pytest.mark.parametrize(
    ("agents", "wanted"),
    [({}, process.RESOLVER), ({"RES_OPTIONS": "ndots:2"}, "ndots:2")],
    ids=["bounded", "the pod's own"],
)
def test_a_lost_answer_of_the_dns_does_not_hold_a_gang_up(agents, wanted):
    start = Start(worker="actor/0", role="actor", kind="fake")
    made = process.environ_of(start, agents, config=Path("c"), folder=Path("f"), socket="s", mark="m")
    assert made["RES_OPTIONS"] == wanted


@pytest.mark.parametrize(
    ("agents", "wanted"),
    [({}, copying.TUNABLES), ({"GLIBC_TUNABLES": "glibc.malloc.check=3"}, "glibc.malloc.check=3")],
    ids=["past the caches", "the pod's own"],
)
def test_workers_copy_whole_tensors_past_the_caches(agents, wanted):
    start = Start(worker="actor/0", role="actor", kind="fake")
    made = process.environ_of(start, agents, config=Path("c"), folder=Path("f"), socket="s", mark="m")
    assert made["GLIBC_TUNABLES"] == wanted
