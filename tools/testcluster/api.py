"""A small client for the API server, on the standard library: what the tool itself needs while a cluster comes up.

The official client takes longer to import than a node takes to register. Tests use that one (`Cluster.api_client`).
"""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tools.testcluster.errors import ClusterError


class ApiError(ClusterError):
    """The API server refused; `status` is its HTTP status, 0 when it could not be reached."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Api:
    def __init__(self, server: str, *, ca: Path, certificate: Path, key: Path) -> None:
        self._address = urlsplit(server)
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._tls.load_cert_chain(certificate, key)

    def request(
        self, method: str, path: str, *, body: Any = None, kind: str = "application/json", timeout_s: float = 10.0
    ) -> Any:
        """The decoded answer; text when it is not JSON."""
        connection = http.client.HTTPSConnection(
            self._address.hostname or "", self._address.port, timeout=timeout_s, context=self._tls
        )
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, body=data, headers={"Content-Type": kind, "Accept": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as err:
            raise ApiError(
                f"{method} {path}: the API server at {self._address.netloc} did not answer: {err}", status=0
            ) from err
        finally:
            connection.close()
        if answer.status >= 400:
            raise ApiError(f"{method} {path}: {answer.status} {_reason(text)}", status=answer.status)
        return json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def apply(self, path: str, manifest: dict[str, Any]) -> Any:
        """Server-side apply: made when absent, brought to this when present."""
        return self.request(
            "PATCH", f"{path}?fieldManager=testcluster&force=true", body=manifest, kind="application/apply-patch+yaml"
        )

    def delete(self, path: str) -> None:
        """Absent already is fine."""
        try:
            self.request("DELETE", path)
        except ApiError as err:
            if err.status != 404:
                raise

    def healthy(self, path: str = "/readyz") -> bool:
        try:
            self.request("GET", path, timeout_s=2.0)
        except ApiError:
            return False
        return True


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return text[:500]
