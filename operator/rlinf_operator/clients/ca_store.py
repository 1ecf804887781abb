"""The operator's CA as a Secret in its own namespace: made once, read by each new leader, rotated without a restart.

| phase | signs | trusted (the bundle) | lasts |
|---|---|---|---|
| steady | ca | ca | until two thirds of the CA's life are over |
| announced | ca | ca, next | a leaf's life: every leaf is renewed once, and so carries both |
| switched | next, now ca | ca, old | a leaf's life: then no leaf of the old one is left |

So at no moment does anybody meet a certificate whose CA it has not been told of. A CA must live more than six times as
long as a leaf for the phases to fit into its last third. The scheduler's certificate is a Secret beside it, which the
scheduler's pod mounts.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509

from rlinf_api import names, times
from rlinf_api.errors import RLinfError
from rlinf_operator.clients import objects
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


def step(chain: Chain, *, now: datetime, leaf_life: timedelta) -> Chain:
    """The chain as it should be now; pure but for a new key. At most one phase further."""
    certificate = x509.load_pem_x509_certificate(chain.pem)
    life = certificate.not_valid_after_utc - _made_at(chain.pem)
    if chain.next_pem:
        if now < _made_at(chain.next_pem) + leaf_life:
            return chain
        return Chain(pem=chain.next_pem, key=chain.next_key, old_pem=chain.pem, switched_at=now)
    if chain.old_pem:
        done = chain.switched_at is None or now >= chain.switched_at + leaf_life
        return replace(chain, old_pem=b"", switched_at=None) if done else chain
    if now >= certificate.not_valid_after_utc - life / 3:
        fresh = certificates.make_authority(now=now, life=life)
        return replace(chain, next_pem=fresh.certificate_pem, next_key=fresh.key_pem)
    return chain


class CaStore:
    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str,
        name: str,
        clock: Callable[[], datetime],
        ca_life: timedelta,
        leaf_life: timedelta,
    ) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._clock, self._ca_life, self._leaf_life = clock, ca_life, leaf_life

    async def load(self) -> CertificateAuthority:
        """The CA to sign with; makes it where there is none, moves it on where that is due. Of two replicas that make
        one at once the API server takes the first, and the other reads it."""
        secret = await self._read() or await self._make()
        chain = _chain(secret)
        wanted = step(chain, now=self._clock(), leaf_life=self._leaf_life)
        if wanted != chain:
            # resourceVersion: of two leaders in a row only one moves it on.
            meta = {
                "resourceVersion": secret["metadata"]["resourceVersion"],
                "annotations": {SWITCHED: times.text(wanted.switched_at) if wanted.switched_at else None},
            }
            gone: dict[str, str | None] = dict.fromkeys(secret["data"])
            change = {"metadata": meta, "data": gone | _data(wanted)}
            await self._api.patch("Secret", self._name, patch=change, namespace=self._namespace)
            logger.info("certificate authority moved on", extra={"secret": f"{self._namespace}/{self._name}"})
        return wanted.authority()

    async def _read(self) -> Manifest | None:
        try:
            return await self._api.get("Secret", self._name, namespace=self._namespace)
        except RLinfError as error:
            if objects.is_gone(error):
                return None
            raise

    async def _make(self) -> Manifest:
        made = certificates.make_authority(now=self._clock(), life=self._ca_life)
        chain = Chain(pem=made.certificate_pem, key=made.key_pem)
        try:
            created = await self._api.create(_own_secret(self._name, self._namespace, data=_data(chain)))
        except RLinfError as error:
            if not objects.is_taken(error):
                raise
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
    except RLinfError as error:
        if not objects.is_taken(error):
            raise
        change = {"metadata": {"annotations": secret["metadata"]["annotations"]}, "data": data}
        await api.patch("Secret", name, patch=change, namespace=namespace)
    return leaf.not_after


def _made_at(pem: bytes) -> datetime:
    return x509.load_pem_x509_certificate(pem).not_valid_before_utc + certificates.BACKDATED


_FILES: Final = {"ca.crt": "pem", "ca.key": "key", "next.crt": "next_pem", "next.key": "next_key", "old.crt": "old_pem"}


def _chain(secret: Manifest) -> Chain:
    meta, data = secret["metadata"], secret.get("data") or {}
    found = {field: base64.b64decode(data.get(file, "")) for file, field in _FILES.items()}
    if not found["pem"] or not found["key"]:
        raise RLinfError(
            f"Secret {meta['namespace']}/{meta['name']} is no certificate authority", got=", ".join(sorted(data)),
            wanted="ca.crt and ca.key", next="delete it: a new one is made, and with it the certificates of all jobs",
        )  # fmt: skip
    return Chain(**found, switched_at=times.parse((meta.get("annotations") or {}).get(SWITCHED)))


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
