"""The CA as a Secret: made once, kept, rotated in phases in which nobody meets a stranger."""

import base64
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from rlinf_api.errors import RLinfError
from rlinf_operator.access import CA_SECRET
from rlinf_operator.clients import ca_store
from rlinf_operator.clients.authority import Authority
from rlinf_operator.clients.ca_store import Certificates, Chain
from rlinf_operator.manifests import certificates
from rlinf_operator.manifests.certificates import Leaf
from tests.builders import NOW

LEAF_LIFE = timedelta(minutes=3)
CA_LIFE = timedelta(hours=1)


class Clock:
    def __init__(self):
        self.now = NOW

    def __call__(self):
        return self.now


def store_of(server, clock):
    return Certificates(
        server.client(), namespace="rlinf-system", folder=Path("unwritten"), clock=clock, ca_life=CA_LIFE,
        leaf_life=LEAF_LIFE,
    )  # fmt: skip


def chain_at(now=NOW):
    made = certificates.make_authority(now=now, life=CA_LIFE)
    return Chain(pem=made.certificate_pem, key=made.key_pem)


def trusts(bundle: bytes, pem: bytes) -> bool:
    """Whether a holder of the bundle accepts the certificate."""
    leaf = x509.load_pem_x509_certificate(pem)
    for ca in x509.load_pem_x509_certificates(bundle):
        try:
            leaf.verify_directly_issued_by(ca)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return True
    return False


async def test_it_is_made_once_and_read_by_the_next_leader(server):
    first = await store_of(server, Clock()).load()
    second = await store_of(server, Clock()).load()
    assert first == second
    assert server.count("POST", "/secrets") == 1


async def test_of_two_that_make_it_at_once_both_have_the_first(server):
    server.fault(status=404, method="GET", path=f"/secrets/{CA_SECRET}")
    await store_of(server, Clock()).load()
    server.fault(status=404, method="GET", path=f"/secrets/{CA_SECRET}")
    await store_of(server, Clock()).load()
    assert server.count("POST", "/secrets") == 2
    secret = server.objects["Secret", "rlinf-system", CA_SECRET]
    assert ca_store._chain(secret).authority() == await store_of(server, Clock()).load()


async def test_a_secret_that_is_no_ca_is_said_to_be_none(server):
    server.put({"kind": "Secret", "metadata": {"name": CA_SECRET, "namespace": "rlinf-system"}, "data": {"x": ""}})
    with pytest.raises(RLinfError, match="is no certificate authority"):
        await store_of(server, Clock()).load()


def of_data(**files):
    data = {name.replace("_", "."): base64.b64encode(content).decode() for name, content in files.items()}
    return {"kind": "Secret", "metadata": {"name": CA_SECRET, "namespace": "rlinf-system"}, "data": data}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ca_crt": b"-----BEGIN CERTIFICATE-----"}, "ca.crt, ca.key"),
        ({"ca_key": b"no key"}, "ca.crt, ca.key"),
        ({"ca_key": chain_at().key}, r"ca.crt, ca.key \(the key is not the certificate's"),
        ({"next_crt": chain_at().pem}, "ca.crt, ca.key, next.crt"),
        ({"old_crt": b"?"}, "ca.crt, ca.key, old.crt"),
    ],
)
async def test_a_secret_that_cannot_sign_is_named_with_what_is_wrong(server, change, sentence):
    good = chain_at()
    server.put(of_data(**({"ca_crt": good.pem, "ca_key": good.key} | change)))
    with pytest.raises(RLinfError, match=f"is no certificate authority: got {sentence}") as caught:
        await store_of(server, Clock()).load()
    assert "delete it: a new one is made" in str(caught.value)


async def test_a_leaf_is_no_certificate_authority(server):
    leaf = Authority.new(clock=Clock(), life=LEAF_LIFE).leaf("operator")
    server.put(of_data(ca_crt=leaf.certificate_pem, ca_key=leaf.key_pem))
    with pytest.raises(RLinfError, match="the certificate is no CA's"):
        await store_of(server, Clock()).load()


def announced(at):
    """A CA of NOW with its successor, which was announced then."""
    fresh = chain_at(at)
    return replace(chain_at(), next_pem=fresh.pem, next_key=fresh.key)


@pytest.mark.parametrize(
    ("chain", "now"),
    [
        (chain_at(), NOW + CA_LIFE * 1.01),
        (chain_at(), NOW + CA_LIFE * 20),
        (chain_at(), NOW + CA_LIFE - LEAF_LIFE / 6),
        (chain_at(), NOW + CA_LIFE - LEAF_LIFE),
        (replace(chain_at(), old_pem=chain_at().pem, switched_at=NOW), NOW + CA_LIFE * 1.01),
        (announced(NOW + CA_LIFE * 0.99), NOW + CA_LIFE * 1.01),
        (announced(NOW + CA_LIFE * 0.7), NOW + CA_LIFE * 3),
    ],
    ids=[
        "over",
        "long over",
        "nearly over",
        "too late to announce",
        "over once switched",
        "announced late",
        "both over",
    ],
)
async def test_a_ca_that_is_over_is_exchanged_at_once(server, chain, now, caplog):
    """No operator ran meanwhile, or an old Secret was brought back."""
    clock = Clock()
    clock.now = now
    names = {"ca_crt": chain.pem, "ca_key": chain.key, "next_crt": chain.next_pem, "next_key": chain.next_key}
    server.put(of_data(**{name: content for name, content in (names | {"old_crt": chain.old_pem}).items() if content}))
    store = store_of(server, clock)
    ca = await store.load()
    assert ca.certificate_pem not in (chain.pem, chain.next_pem)
    assert ca.trusted_pem == ca.certificate_pem, "jobs of a CA that is trusted still are renewed in their own time"
    assert Authority(ca, clock=clock, life=LEAF_LIFE).leaf("operator").not_after == now + LEAF_LIFE
    assert await store.load() == ca, "and once"
    assert [r.getMessage() for r in caplog.records] == ["certificate authority exchanged, as the one before is over"]


def test_the_shortest_ca_is_rotated_in_its_phases_however_late_it_is_looked_at():
    life = LEAF_LIFE * 6.1
    for late in (0.0, 0.02, 0.05):
        made = certificates.make_authority(now=NOW, life=life)
        now = NOW + life * 2 / 3 + LEAF_LIFE * late
        chain = Chain(pem=made.certificate_pem, key=made.key_pem)
        found = ca_store.step(chain, now=now, leaf_life=LEAF_LIFE, ca_life=life)
        assert (found.pem, bool(found.next_pem)) == (chain.pem, True), f"{late} of a leaf's life late"


def test_no_leaf_is_so_short_that_it_is_renewed_at_once():
    """Whenever an operator comes back."""
    for away in range(0, 100, 4):
        clock = Clock()
        clock.now = NOW + CA_LIFE * away / 100
        chain = chain_at()
        for _ in range(60):
            chain = ca_store.step(chain, now=clock.now, leaf_life=LEAF_LIFE, ca_life=CA_LIFE)
            left = x509.load_pem_x509_certificate(chain.pem).not_valid_after_utc - clock.now
            assert left >= LEAF_LIFE / 3, f"away for {away} % of the CA's life"
            clock.now += LEAF_LIFE / 20


def test_phases_follow_each_other_in_their_times():
    chain = chain_at()
    seen: list[tuple[str, timedelta]] = []
    now = NOW
    while now < NOW + CA_LIFE * 0.85:
        chain = ca_store.step(chain, now=now, leaf_life=LEAF_LIFE, ca_life=CA_LIFE)
        phase = "announced" if chain.next_pem else "switched" if chain.old_pem else "steady"
        if not seen or seen[-1][0] != phase:
            seen.append((phase, now - NOW))
        now += timedelta(seconds=10)
    assert [phase for phase, _ in seen] == ["steady", "announced", "switched", "steady"]
    times = [at.total_seconds() / 60 for _, at in seen]
    assert times == [0, pytest.approx(40, abs=0.5), pytest.approx(43, abs=0.5), pytest.approx(46, abs=0.5)]


SECOND = timedelta(seconds=1)
ANNOUNCED = NOW + CA_LIFE * 2 / 3  # CA_LIFE is long beside two lives of a leaf
SWITCHED = replace(chain_at(), old_pem=chain_at().pem, switched_at=NOW)


@pytest.mark.parametrize(
    ("chain", "at", "before", "since"),
    [
        (chain_at(), ANNOUNCED, "steady", "announced"),
        (chain_at(), NOW + CA_LIFE - LEAF_LIFE * 1.5, "announced", "fresh"),
        (announced(ANNOUNCED), ANNOUNCED + LEAF_LIFE, "announced", "switched"),
        (SWITCHED, NOW + LEAF_LIFE, "switched", "steady"),
        (replace(SWITCHED, switched_at=None), NOW, "steady", "steady"),
        (SWITCHED, NOW + CA_LIFE - LEAF_LIFE / 2, "steady", "fresh"),
        (announced(NOW + CA_LIFE - LEAF_LIFE), NOW + CA_LIFE - LEAF_LIFE / 2, "announced", "fresh"),
    ],
)
def test_a_phase_begins_at_its_time_and_not_a_second_before(chain, at, before, since):
    """A CA that signs for less than half a leaf's life is over, and one that would before it is switched to."""

    def phase(now):
        found = ca_store.step(chain, now=now, leaf_life=LEAF_LIFE, ca_life=CA_LIFE)
        if found.pem not in (chain.pem, chain.next_pem):
            assert found == Chain(pem=found.pem, key=found.key)
            return "fresh"
        return "announced" if found.next_pem else "switched" if found.old_pem else "steady"

    assert [phase(now) for now in (at - SECOND, at, at + SECOND)] == [before, since, since]


def test_while_it_rotates_everybody_accepts_everybody():
    """Leaves of each moment of the last five minutes, each with the bundle that it was issued with."""
    clock = Clock()
    chain = chain_at()
    alive: list[Leaf] = []
    while clock.now < NOW + CA_LIFE * 0.85:
        chain = ca_store.step(chain, now=clock.now, leaf_life=LEAF_LIFE, ca_life=CA_LIFE)
        leaf = Authority(chain.authority(), clock=clock, life=LEAF_LIFE).leaf("driver", namespace="t", job_uid="u")
        alive = [entry for entry in alive if entry.not_after > clock.now] + [leaf]
        for one in alive:
            assert trusts(one.ca_pem, leaf.certificate_pem), f"a stranger at {clock.now - NOW}"
            assert trusts(leaf.ca_pem, one.certificate_pem), f"a stranger at {clock.now - NOW}"
        clock.now += timedelta(seconds=20)


async def test_a_rotation_is_written_whole(server):
    clock = Clock()
    store = store_of(server, clock)
    first = await store.load()
    for minutes in (41, 45, 50):
        clock.now = NOW + timedelta(minutes=minutes)
        await store.load()
    last = await store.load()
    assert last.certificate_pem != first.certificate_pem
    assert last.trusted_pem == last.certificate_pem, "the old one is still trusted"
    assert await store_of(server, clock).load() == last


async def test_of_two_leaders_in_a_row_one_rotates(server):
    clock = Clock()
    store = store_of(server, clock)
    await store.load()
    clock.now = NOW + timedelta(minutes=41)
    server.fault(status=409, method="PATCH", path=f"/secrets/{CA_SECRET}", reason="Conflict")
    with pytest.raises(RLinfError) as caught:
        await store.load()
    assert caught.value.reason == "Conflict"


async def test_the_schedulers_certificate_is_written_and_renewed(server):
    authority = Authority.new(clock=Clock(), life=LEAF_LIFE)
    write = {"name": "tls", "namespace": "rlinf-system"}
    ends = await ca_store.write_part(server.client(), authority, "scheduler", **write)
    assert ends == NOW + LEAF_LIFE
    before = server.objects["Secret", "rlinf-system", "tls"]["data"]["tls.crt"]
    await ca_store.write_part(server.client(), authority, "scheduler", **write)
    assert server.objects["Secret", "rlinf-system", "tls"]["data"]["tls.crt"] != before
    assert server.count("GET", "/secrets/tls") == 0


def test_a_chain_that_is_well_is_left_alone():
    chain = chain_at()
    assert ca_store.step(chain, now=NOW + CA_LIFE / 2, leaf_life=LEAF_LIFE, ca_life=CA_LIFE) == chain
    assert replace(chain) == chain
