"""What the machine has once is taken from it, which a job beside it would miss: tests here run one after the other."""

import subprocess
import sys

import pytest

from tests.rljob_runs import Run

pytestmark = pytest.mark.timeout(150)


def test_a_port_that_is_taken_on_every_address_is_named_until_it_is_free(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c",
         "import socket; s = socket.create_server(('0.0.0.0', 7070)); print(1, flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            pytest.skip("port 7070 is in use on this machine")
        with Run(tmp_path, "spec.flow.config.env=CartPoll-v1") as run:
            run.until_said("PodsReady=False Unschedulable: no node has room for")
            assert "7070" in run.said
            assert "stop the program that listens on every address (ss -ltnp shows it)" in run.said
            holder.communicate("", timeout=30)
            assert run.end() == 1, run.said
            assert "does not exist" in run.answer["message"], "it goes on by itself"
            assert run.left() == []
    finally:
        holder.kill()
        holder.communicate()
