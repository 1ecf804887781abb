"""The lane over gloo: when it is chosen, and that a peer that died or hangs keeps nobody waiting."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
import torch  # without it no lane is over gloo

from rlinf_worker.links import gloo, tcp
from rlinf_worker.links.endpoint import Listener
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message
from rlinf_worker.links.protocol import LinkBroken, LinkSettings

ME = Identity(job="job-1", worker="b", attempt=0)
PEER = Identity(job="job-1", worker="a", attempt=0)

DIALER = """
import asyncio, sys, torch
from rlinf_worker.links import tcp
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message
from rlinf_worker.links.protocol import LinkSettings

async def main():
    link = await tcp.dial("127.0.0.1", int(sys.argv[1]), Identity(job="job-1", worker="a", attempt=0), to_worker="b",
                          to_attempt=0, settings=LinkSettings(bulk="gloo", dial_timeout_s=50.0), context=None,
                          server_name=None)
    assert link._lane.kind == "gloo"
    number = 0
    while True:
        await link.send(Message(b"%d" % number, bytes([number % 256]) * 2_000_000))
        number += 1

asyncio.run(main())
"""


async def listen(run_dir, **settings):
    return await Listener.open(
        ME, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1", settings=LinkSettings(**settings)
    )


@pytest.mark.parametrize(
    ("here", "there", "loaded", "kind"),
    [
        ("gloo", "plain", True, "plain"),
        ("plain", "gloo", True, "plain"),
        ("gloo", "gloo", False, "plain"),
        ("gloo", "tls", True, None),
    ],
)
async def test_gloo_needs_torch_and_the_word_of_both_ends(run_dir, monkeypatch, here, there, loaded, kind):
    monkeypatch.setattr(gloo, "at_hand", lambda: loaded)
    listener = await listen(run_dir, bulk=here)
    a = await tcp.dial(
        "127.0.0.1", listener.endpoint.port, PEER, to_worker="b", to_attempt=0, settings=LinkSettings(bulk=there),
        context=None, server_name=None,
    )  # fmt: skip
    b = await listener.accept()
    await a.send(Message(b"", np.ones(1_000_000, np.uint8)))
    assert (await b.recv()).value().sum() == 1_000_000
    assert (a._lane.kind if a._lane else None) == kind
    for thing in (a, b, listener):
        await thing.close()


def test_torch_that_is_not_loaded_is_not_at_hand():
    code = (
        "import sys; from rlinf_worker.links import gloo, tcp; assert not gloo.at_hand(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "so_far",
    [types.SimpleNamespace(), types.SimpleNamespace(is_available=lambda: True)],
    ids=["just begun", "without its back ends"],
)
def test_torch_that_another_thread_still_imports_is_not_at_hand(monkeypatch, so_far):
    monkeypatch.setitem(sys.modules, "torch.distributed", so_far)
    assert gloo.at_hand() is False


async def receive_for_ever(link):
    while True:
        (await link.recv()).release()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_peer_that_is_gone_in_mid_message_keeps_nobody_waiting(run_dir, monkeypatch, how):
    """Killed: its connection ends. Stopped: on the control plane's word, as gloo itself would wait for half an hour."""
    assert torch.distributed.is_gloo_available()
    monkeypatch.setattr(gloo, "STORE_WAIT_S", 30.0)
    listener = await listen(run_dir, bulk="gloo", inbox_bytes=1_000_000, hello_timeout_s=50.0)
    arguments = [sys.executable, "-c", DIALER, str(listener.endpoint.port)]
    process = await asyncio.to_thread(subprocess.Popen, arguments)
    try:
        async with asyncio.timeout(50):
            link = await listener.accept()
            for number in range(5):
                with await link.recv() as message:
                    assert message.head == b"%d" % number
                    assert message.value() == bytes([number % 256]) * 2_000_000
        os.kill(process.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped":
            asyncio.get_running_loop().call_later(0.3, link.abort, "its node is lost")
        with pytest.raises(LinkBroken, match="is gone" if how == "killed" else "its node is lost"):
            await asyncio.wait_for(receive_for_ever(link), 20)
    finally:
        process.kill()
        process.wait()
    await link.close()
    await listener.close()
