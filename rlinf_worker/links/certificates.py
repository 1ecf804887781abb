"""mTLS of the links between pods, with the certificates as they are at each handshake.

A worker outlives its certificate: the operator renews it at two thirds of its life and the kubelet swaps the files
under the mount. A link made after that, to a pod that was replaced or after a break, shows the new one and asks for the
CA of the new bundle; links that stand are left alone.
"""

from __future__ import annotations

import logging
import ssl

from rlinf_api import rpc
from rlinf_api.errors import UserError

logger = logging.getLogger(__name__)


class LinkCertificates:
    """Both ends show a certificate of the job's CA. Which worker it is, the links' hello says: a certificate names a
    pool, and the endpoints that a driver hands out do not."""

    def __init__(self, tls: rpc.TlsFolder) -> None:
        """Raises UserError where files are missing."""
        self._tls = tls
        self._files, self._trouble = tls.read(), ""
        self._dialling, self._listening = self._contexts(self._files[0])

    def dialling(self) -> ssl.SSLContext:
        """For the next dial."""
        self._refresh()
        return self._dialling

    def listening(self) -> ssl.SSLContext:
        """For a server's whole life: who dials meets the files of that moment. OpenSSL asks for the server's name at
        each handshake, also of a client that says none, and that is where the context may be another."""

        def at_handshake(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            self._refresh()
            connection.context = self._listening

        entry = _context(self._tls, self._files[0], server=True)
        entry.sni_callback = at_handshake
        return entry

    def _refresh(self) -> None:
        """What cannot be read now (the kubelet may be between two files) is tried again at the next handshake."""
        try:
            files = self._tls.read()
            if files != self._files:
                self._dialling, self._listening = self._contexts(files[0])
                self._files = files
            self._trouble = ""
        except (UserError, OSError, ValueError) as error:
            if str(error) != self._trouble:  # once, and not at each handshake
                logger.warning("certificates not reloaded; those before them serve", extra={"error": str(error)})
            self._trouble = str(error)

    def _contexts(self, ca: bytes) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        return _context(self._tls, ca, server=False), _context(self._tls, ca, server=True)


def _context(tls: rpc.TlsFolder, ca: bytes, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not server:
        context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ca.decode("ascii"))
    context.load_cert_chain(tls.folder / "tls.crt", tls.folder / "tls.key")
    return context
