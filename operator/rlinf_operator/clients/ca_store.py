"""The operator's CA as a Secret in its own namespace: made once, read by each new leader, rotated without a restart.

| phase | signs | trusted (the bundle) | lasts |
|---|---|---|---|
| steady | ca | ca | until two thirds of the CA's life are over |
| announced | ca | ca, next | a leaf's life: every leaf is renewed once, and so carries both |
| switched | next, now ca | ca, old | a leaf's life: then no leaf of the old one is left |

So at no moment does anybody meet a certificate whose CA it has not been told of. A CA must live more than six times as
long as a leaf for the phases to fit into its last third. Where they do not fit any more, as no operator ran meanwhile
or an old Secret was brought back, the CA is exchanged at once, and the certificates of all jobs are made anew (decide,
`_is_of_another_ca`). The scheduler's certificate is a Secret beside it, which the scheduler's pod mounts.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509

from rlinf_api import names, times
from rlinf_api.errors import RLinfError
from rlinf_api.store import AlreadyExists, NotFound
from rlinf_operator import access
from rlinf_operator.clients.authority import Authority
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.manifests import certificates
from rlinf_operator.manifests.certificates import CertificateAuthority
from rlinf_operator.manifests.metadata import Manifest

logger = logging.getLogger(__name__)
SWITCHED: Final = f"{names.GROUP}/ca-switched-at"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The Secret's content. `next_key` beside `next_pem`; `old_pem` since `switched_at`."""

    pem: bytes
    key: bytes
    next_pem: bytes = b""
    next_key: bytes = b""
    old_pem: bytes = b""
    switched_at: datetime | None = None

    def authority(self) -> CertificateAuthority:
        others = self.next_pem + self.old_pem
        bundle = self.pem + others if others else b""
        return CertificateAuthority(certificate_pem=self.pem, key_pem=self.key, bundle_pem=bundle)


def step(chain: Chain, *, now: datetime, leaf_life: timedelta, ca_life: timedelta) -> Chain:
    """The chain as it should be now; pure but for a new key. At most one phase further, and never one whose CA signs
    for less than half a leaf's life: below a third a leaf would be renewed as soon as it is made."""
    if chain.next_pem and now >= _made_at(chain.next_pem) + leaf_life:
        switched = Chain(pem=chain.next_pem, key=chain.next_key, old_pem=chain.pem, switched_at=now)
        return step(switched, now=now, leaf_life=leaf_life, ca_life=ca_life)
    ends = x509.load_pem_x509_certificate(chain.pem).not_valid_after_utc
    if now >= ends - leaf_life / 2:
        return _fresh(now, ca_life)
    if chain.next_pem:
        return chain
    if chain.old_pem:
        done = chain.switched_at is None or now >= chain.switched_at + leaf_life
        return replace(chain, old_pem=b"", switched_at=None) if done else chain
    if now >= ends - leaf_life * 1.5:  # announced now, it would end in the half that is too little
        return _fresh(now, ca_life)
    if now >= ends - max((ends - _made_at(chain.pem)) / 3, leaf_life * 2):
        fresh = _fresh(now, ca_life)
        return replace(chain, next_pem=fresh.pem, next_key=fresh.key)
    return chain


def _fresh(now: datetime, life: timedelta) -> Chain:
    made = certificates.make_authority(now=now, life=life)
    return Chain(pem=made.certificate_pem, key=made.key_pem)


class Certificates:
    """The CA, the operator's own certificate and the scheduler's, kept fresh without a restart."""

    authority: Authority
    """Since begin()."""

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str,
        folder: Path,
        clock: Callable[[], datetime],
        ca_life: timedelta,
        leaf_life: timedelta,
    ) -> None:
        """`folder`: of the operator's own."""
        self._api, self._namespace, self._name, self._folder = api, namespace, access.CA_SECRET, folder
        self._clock, self._ca_life, self._leaf_life = clock, ca_life, leaf_life
        self._renew_at = clock()

    async def begin(self) -> None:
        self.authority = Authority(await self.load(), clock=self._clock, life=self._leaf_life)
        await self._write()

    async def run(self) -> None:
        every_s = min(600.0, self._leaf_life.total_seconds() / 20)
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.once()
            except RLinfError as error:
                logger.warning("certificates not renewed", extra={"error": str(error), "again_in_s": every_s})

    async def once(self) -> None:
        """Renews what is due, by age or as the CA is another one."""
        ca = await self.load()
        if ca != self.authority.ca or self._clock() >= self._renew_at:
            self.authority.ca, self._renew_at = ca, self._clock()  # due until all of it is written
            await self._write()

    async def _write(self) -> None:
        ends = self.authority.write_folder(self._folder, "operator")
        other_ends = await write_part(
            self._api, self.authority, "scheduler", name=access.SCHEDULER_SECRET, namespace=self._namespace
        )
        self._renew_at = min(ends, other_ends) - self._leaf_life / 3

    async def load(self) -> CertificateAuthority:
        """The CA to sign with; makes it where there is none, moves it on where that is due. Of two replicas that make
        one at once the API server takes the first, and the other reads it."""
        secret = await self._read() or await self._make()
        chain = _chain(secret)
        wanted = step(chain, now=self._clock(), leaf_life=self._leaf_life, ca_life=self._ca_life)
        if wanted != chain:
            # resourceVersion: of two leaders in a row only one moves it on.
            meta = {
                "resourceVersion": secret["metadata"]["resourceVersion"],
                "annotations": {SWITCHED: times.text(wanted.switched_at) if wanted.switched_at else None},
            }
            gone: dict[str, str | None] = dict.fromkeys(secret["data"])
            change = {"metadata": meta, "data": gone | _data(wanted)}
            await self._api.patch("Secret", self._name, patch=change, namespace=self._namespace)
            told = {"secret": f"{self._namespace}/{self._name}"}
            if wanted.pem in (chain.pem, chain.next_pem):
                logger.info("certificate authority moved on", extra=told)
            else:
                logger.warning("certificate authority exchanged, as the one before is over", extra=told)
        return wanted.authority()

    async def _read(self) -> Manifest | None:
        try:
            return await self._api.get("Secret", self._name, namespace=self._namespace)
        except NotFound:
            return None

    async def _make(self) -> Manifest:
        data = _data(_fresh(self._clock(), self._ca_life))
        try:
            created = await self._api.create(_own_secret(self._name, self._namespace, data=data))
        except AlreadyExists:
            return await self._api.get("Secret", self._name, namespace=self._namespace)
        logger.info("certificate authority made", extra={"secret": f"{self._namespace}/{self._name}"})
        return created


async def write_part(api: KubeApi, authority: Authority, part: str, *, name: str, namespace: str) -> datetime:
    """A certificate for a part that serves all jobs, into a Secret that its pod mounts. Returns when it ends."""
    leaf = authority.leaf(part)
    data = {file: base64.b64encode(content).decode() for file, content in leaf.files().items()}
    secret = _own_secret(name, namespace, data=data)
    secret["metadata"]["annotations"] = {names.ANNOTATION_CERT_EXPIRY: times.text(leaf.not_after)}
    try:
        await api.create(secret)
    except AlreadyExists:
        change = {"metadata": {"annotations": secret["metadata"]["annotations"]}, "data": data}
        await api.patch("Secret", name, patch=change, namespace=namespace)
    return leaf.not_after


def _made_at(pem: bytes) -> datetime:
    return x509.load_pem_x509_certificate(pem).not_valid_before_utc + certificates.BACKDATED


_FILES: Final = {"ca.crt": "pem", "ca.key": "key", "next.crt": "next_pem", "next.key": "next_key", "old.crt": "old_pem"}


def _chain(secret: Manifest) -> Chain:
    meta, data = secret["metadata"], secret.get("data") or {}
    try:
        found = {field: base64.b64decode(data.get(file, "")) for file, field in _FILES.items()}
        chain = Chain(**found, switched_at=times.parse((meta.get("annotations") or {}).get(SWITCHED)))
        certificates.check_pair(chain.pem, chain.key)
        if chain.next_pem or chain.next_key:
            certificates.check_pair(chain.next_pem, chain.next_key)
        if chain.old_pem:
            x509.load_pem_x509_certificate(chain.old_pem)
    except ValueError as error:
        raise RLinfError(
            f"Secret {meta['namespace']}/{meta['name']} is no certificate authority",
            got=f"{', '.join(sorted(data)) or 'nothing'} ({error})", wanted="ca.crt and ca.key",
            next="delete it: a new one is made, and with it the certificates of all jobs",
        ) from error  # fmt: skip
    return chain


def _data(chain: Chain) -> dict[str, str | None]:
    values: dict[str, bytes] = {file: getattr(chain, field) for file, field in _FILES.items()}
    return {file: base64.b64encode(value).decode() for file, value in values.items() if value}


def _own_secret(name: str, namespace: str, *, data: Manifest) -> Manifest:
    labels = {"app.kubernetes.io/name": "rlinf", "app.kubernetes.io/managed-by": names.MANAGER}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "type": "Opaque",
        "data": data,
    }
