"""Who is at the other end: the first frame each way on a new connection, and the rules by which it is refused.

For: `shm`, `tcp` and `listener`. Pure: bytes in, verdict out. Not for: what a peer may do afterwards (channels), nor
for proving who it is: that is the kernel's word (same uid, `shm`) or the certificate's (`tcp`), which `admit` sees.

    dialer -> listener   job, worker, attempt, protocol number, and which worker and attempt it wants to reach
    listener -> dialer   the same of itself, with yes, or no and a sentence

    {"magic": "rlinf-link", "protocol": 1, "from": {"job": "5c1d...", "worker": "env/0", "attempt": 1},
     "to_worker": "rollout/0", "to_attempt": 2, "extra": {"bulk": "plain"}}
    {"magic": "rlinf-link", "protocol": 1, "from": {"job": "5c1d...", "worker": "rollout/0", "attempt": 3},
     "ok": false, "code": "stale", "sentence": "worker env/0#1 wants attempt 2 of worker rollout/0, which is at 3"}

Both ends check the protocol number before anything else, and both get a sentence. One number is spoken: all images of a
job have the same version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rlinf_api import names
from rlinf_api.errors import RLinfError
from rlinf_worker.links.errors import LinkRefused, LinkStale, ShmTooSmall

PROTOCOL = 1
"""Raised whenever frame, ring or payload header change: nothing in them is self-describing."""

MAX_HELLO_BYTES = 4096
_MAGIC = "rlinf-link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One life of one worker: Identity(job="5c1d2a90-...", worker="rollout/0", attempt=2)."""

    job: str
    worker: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.worker}#{self.attempt}"


Certificate = Mapping[str, Any]
"""As `ssl.SSLSocket.getpeercert` gives it; None in its place: the peer is of this pod, or there is no TLS."""

Admit = Callable[[Identity, Certificate | None], None]
"""Called by a listener for each hello that is otherwise in order. Raises Refusal("admit", ...), for an old attempt
Refusal("stale", ...), so that the dialer learns to exit and not to try again."""


class Refusal(Exception):
    """A no that has still to be told to the other end. `code` is for programs, the text for people."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code, self.sentence = code, sentence

    def as_error(self, peer: str) -> RLinfError:
        """What `dial` raises."""
        if self.code == "stale":
            return LinkStale(f"worker {peer} and this worker do not agree on attempts", got=self.sentence)
        if self.code == "shm":
            return ShmTooSmall(f"worker {peer} cannot make its ring", got=self.sentence)
        return LinkRefused(f"no link to worker {peer}", got=self.sentence)


def certified_part(certificate: Certificate | None) -> names.PartIdentity | None:
    """Whom a certificate names; None where it names nobody of ours."""
    for kind, text in (certificate or {}).get("subjectAltName", ()):
        if kind == "URI" and (found := names.parse_spiffe_id(text)) is not None:
            return found
    return None


def check_certificate(certificate: Certificate | None, me: Identity, *, pool: str = "") -> None:
    """That the other end of a TLS connection is a worker of this job and, where it is known, of `pool`. None: no TLS.

    A CA signs for one job only, so another job's certificate would not get this far; that it cannot is checked here
    and not assumed. Raises Refusal.
    """
    if certificate is None:
        return
    found = certified_part(certificate)
    if found is None:
        raise Refusal("certificate", "the other end's certificate names no part of a job (URI spiffe://rlinf.io/...)")
    if found.job_uid != me.job:
        raise Refusal("certificate", f"the other end's certificate is of job {found.job_uid}, worker {me} of {me.job}")
    wanted = f"pool:{pool}" if pool else "pool:"
    if found.part != wanted if pool else not found.part.startswith(wanted):
        raise Refusal("certificate", f"the other end's certificate is of part {found.part!r}, wanted {wanted!r}")


def ask(me: Identity, peer: Identity, *, extra: Mapping[str, Any] | None = None) -> bytes:
    """The dialer's hello."""
    return _pack({"to_worker": peer.worker, "to_attempt": peer.attempt, "extra": extra or {}}, me)


def yes(me: Identity, *, extra: Mapping[str, Any] | None = None) -> bytes:
    """The listener's consent."""
    return _pack({"ok": True, "extra": extra or {}}, me)


def no(me: Identity, refusal: Refusal) -> bytes:
    """The listener's refusal."""
    return _pack({"ok": False, "code": refusal.code, "sentence": refusal.sentence[:2000], "extra": {}}, me)


def _pack(fields: dict[str, Any], me: Identity) -> bytes:
    said = {"magic": _MAGIC, "protocol": PROTOCOL, "from": me}
    return msgspec.msgpack.encode(said | fields)


def _open(raw: bytes | memoryview, me: Identity) -> tuple[dict[str, Any], Identity]:
    try:
        fields = msgspec.msgpack.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise Refusal("garbage", f"got {len(raw)} bytes that are no hello of a worker: {err}") from None
    if fields.get("magic") != _MAGIC:
        raise Refusal("garbage", f"got a hello without the mark {_MAGIC!r}: something else than a worker is calling")
    try:
        peer = msgspec.convert(fields["from"], Identity)
        number = fields["protocol"]
    except (KeyError, msgspec.ValidationError) as err:
        raise Refusal("garbage", f"got a hello without an identity: {err}") from None
    if type(number) is not int or number != PROTOCOL:
        raise Refusal(
            "protocol",
            f"worker {peer} speaks link protocol {number!r:.40}, worker {me} speaks {PROTOCOL}; "
            "run the same version of rlinf_worker in all images of a job",
        )
    return fields, peer


def check_ask(
    raw: bytes | memoryview, me: Identity, *, certificate: Certificate | None = None, admit: Admit | None
) -> tuple[Identity, dict[str, Any]]:
    """The listener's verdict on a dialer's hello: who it is, and its extras. Raises Refusal."""
    fields, peer = _open(raw, me)
    extra = fields.get("extra")
    if not isinstance(extra, dict):
        raise Refusal("garbage", "got a hello whose extras are no map")
    if peer.job != me.job:
        raise Refusal("job", f"worker {peer} is of job {peer.job}, worker {me} of job {me.job}")
    wanted = (fields.get("to_worker"), fields.get("to_attempt"))
    if wanted[0] != me.worker:
        raise Refusal("worker", f"worker {peer} wants worker {wanted[0]!r:.80}, but this address is worker {me}'s now")
    if wanted[1] != me.attempt:
        raise Refusal(
            "stale", f"worker {peer} wants attempt {wanted[1]!r:.20} of worker {me.worker}, which is at {me.attempt}"
        )
    if admit is not None:
        admit(peer, certificate)
    return peer, extra


def check_answer(raw: bytes | memoryview, me: Identity, peer: Identity) -> dict[str, Any]:
    """The dialer's verdict on the answer: its extras. Raises Refusal."""
    fields, found = _open(raw, me)
    if fields.get("ok") is not True:
        raise Refusal(str(fields.get("code")), str(fields.get("sentence")))
    if found != peer:
        raise Refusal("worker", f"dialled {peer} of job {me.job}, reached {found} of job {found.job}")
    extra = fields.get("extra")
    return extra if isinstance(extra, dict) else {}
