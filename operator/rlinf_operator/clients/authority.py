"""Who issues certificates: the operator's CA with a clock. The only place of the operator where keys are made.

    authority = Authority.new(clock=times.utc_now)
    manifest, not_after = authority.secret(job, "driver")
    authority.write_folder(Path("tls/operator"), "operator")     # for rpc.TlsFolder; mode 0600

The key of the CA never leaves this object, except by `ca`, for whoever stores it in the operator's own namespace.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from rlinf_operator.manifests import certificates
from rlinf_operator.manifests.certificates import CertificateAuthority, Leaf
from rlinf_operator.manifests.metadata import JobMeta, Manifest

CA_LIFE: Final = timedelta(days=5 * 365)


class Authority:
    def __init__(self, ca: CertificateAuthority, *, clock: Callable[[], datetime], life: timedelta) -> None:
        self.ca, self._clock, self._life = ca, clock, life
        self._known: tuple[CertificateAuthority, tuple[str, ...]] | None = None

    @classmethod
    def new(cls, *, clock: Callable[[], datetime], life: timedelta = timedelta(days=30)) -> Authority:
        return cls(certificates.make_authority(now=clock(), life=CA_LIFE), clock=clock, life=life)

    def trusted(self) -> tuple[str, ...]:
        """Fingerprints of the CAs whose certificates count, the one that signs first. Kept, as each pass asks."""
        if self._known is None or self._known[0] is not self.ca:
            self._known = self.ca, certificates.fingerprints(self.ca.trusted_pem)
        return self._known[1]

    def leaf(self, part: str, *, namespace: str = certificates.ANY, job_uid: str = certificates.ANY) -> Leaf:
        return certificates.issue(
            self.ca, part=part, namespace=namespace, job_uid=job_uid, now=self._clock(), life=self._life
        )

    def secret(self, job: JobMeta, part: str) -> tuple[Manifest, datetime]:
        leaf = self.leaf(part, namespace=job.namespace, job_uid=job.uid)
        return certificates.secret(job, part, leaf), leaf.not_after

    def write_folder(self, folder: Path, part: str) -> datetime:
        """A certificate for a part that serves all jobs (operator, scheduler), as files; returns when it expires."""
        leaf = self.leaf(part)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in leaf.files().items():
            partial = folder / f".{name}"
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            partial.replace(folder / name)
        return leaf.not_after
