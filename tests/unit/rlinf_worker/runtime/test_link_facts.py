"""What a worker's links are told by its pod, and by the driver of others."""

from __future__ import annotations

import asyncio

import pytest

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_worker.channels import messages
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.hello import Identity, Refusal
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.peers import PeerLinks
from rlinf_worker.runtime.main import link_settings

THERE = Endpoint(worker="env/0", attempt=2, pod_uid="u", unix_path="/x", host="10.0.0.1", port=7, pool="sim")


def test_an_endpoint_keeps_its_pool_on_the_way_through_the_driver():
    assert messages.endpoint_from_pb(messages.endpoint_to_pb(THERE)) == THERE


def test_large_buffers_go_the_fast_way_unless_the_pools_template_says_otherwise():
    assert link_settings({}).bulk == "plain"
    assert link_settings({names.ENV_LINK_BULK: "tls"}).bulk == "tls"
    with pytest.raises(UserError, match="RLINF_LINK_BULK cannot be used: got 'none', wanted plain or tls"):
        link_settings({names.ENV_LINK_BULK: "none"})
    assert link_settings({}).gpu == "direct"
    assert link_settings({names.ENV_LINK_GPU: "host"}).gpu == "host"
    with pytest.raises(UserError, match="RLINF_LINK_GPU cannot be used: got 'no', wanted direct or host"):
        link_settings({names.ENV_LINK_GPU: "no"})


async def test_a_worker_that_shows_another_pools_certificate_is_not_admitted(tmp_path):
    me = Identity(job="j", worker="actor/0", attempt=1)
    listener = await Listener.open(me, pod_uid="p", run_dir=str(tmp_path), shm_dir="/dev/shm", host=None)
    peers = PeerLinks(listener, on_fatal=lambda error: None)
    peers.peer(THERE.worker, THERE.attempt).endpoint = THERE
    them = Identity(job="j", worker=THERE.worker, attempt=THERE.attempt)

    def certificate(pool):
        uri = names.spiffe_id("team", "j", f"pool:{pool}")
        return {"subjectAltName": (("URI", uri),)}

    peers.admit(them, certificate("sim"))
    with pytest.raises(Refusal, match="is of pool sim, its certificate of pool:gpu"):
        peers.admit(them, certificate("gpu"))
    peers.admit(them, None)
    async with asyncio.timeout(5):
        await listener.close()
