"""The misbehaving proxy before an API server that is only a stand-in: what it keeps open, and what it passes on."""

import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from tools.testcluster import pki
from tools.testcluster.apiproxy import Action, ApiProxy, CutWatch, Mute, Rule, choose
from tools.testcluster.cluster import Cluster
from tools.testcluster.layout import Addresses, Paths

pytestmark = pytest.mark.timeout(60)


class Server(ThreadingHTTPServer):
    """Answers every GET with an empty list, and remembers by which connections it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        self.connections: list[tuple[str, int]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        cast("Server", self.server).connections.append(self.client_address)
        body = b'{"kind":"List","items":[]}'
        self.send_response(200)
        # One that says more than it sends: an API server that ends in the middle of an answer.
        self.send_header("Content-Length", str(len(body) + (100 if self.path == "/torn" else 0)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.path == "/torn"

    def log_message(self, *_: object) -> None:
        """Not to the test's output."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pki.write(tmp_path / "pki", Addresses(net=64), nodes=1)
    key, certificate = pki.issue_from(
        tmp_path / "pki", pki.Identity(file="stand-in", common_name="stand-in", ips=("127.0.0.1",))
    )
    (tmp_path / "stand-in.pem").write_bytes(key + certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "stand-in.pem")
    with Server() as made:
        made.socket = context.wrap_socket(made.socket, server_side=True)
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join(timeout=10)


@pytest.fixture
def proxy(server: Server, tmp_path: Path) -> Iterator[ApiProxy]:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump({"clusters": [{"cluster": {"server": ""}}]}))
    addresses = SimpleNamespace(machine_link="127.0.0.1", server=f"https://127.0.0.1:{server.server_address[1]}")
    cluster: Any = SimpleNamespace(paths=Paths(name="dev", root=tmp_path), addresses=addresses, kubeconfig=kubeconfig)
    with ApiProxy(cast("Cluster", cluster)) as made:
        yield made


def caller(proxy: ApiProxy) -> http.client.HTTPSConnection:
    """An administrator, by a client certificate."""
    folder = proxy.cluster.paths.pki
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "admin.crt", folder / "admin.key")
    return http.client.HTTPSConnection("127.0.0.1", proxy.port, context=context, timeout=20)


def get(proxy: ApiProxy, path: str, *, token: str | None = None) -> Any:
    connection = caller(proxy)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_connections_to_the_api_server_are_used_again(proxy: ApiProxy, server: Server):
    for _ in range(10):
        assert get(proxy, "/api/v1/pods")["items"] == []
        assert get(proxy, "/api/v1/pods", token="another")["items"] == []
    assert len(server.connections) == 20
    assert len(set(server.connections)) == 2, "one as the administrator, one for callers with a token"


@pytest.mark.parametrize("path", ["/api/v1/pods", "/torn"], ids=["down", "ends in the middle"])
def test_without_an_api_server_a_caller_sees_a_closed_connection(proxy: ApiProxy, server: Server, path: str):
    if path != "/torn":
        server.shutdown()
        server.server_close()
    with pytest.raises((http.client.HTTPException, ConnectionError, ssl.SSLError)):
        get(proxy, path)


@pytest.mark.parametrize("action", [CutWatch(after_s=2.0), CutWatch(gone=True), Mute()])
def test_what_is_done_to_watches_is_not_used_up_by_other_requests(action: Action):
    """`proxy --cut-watch-s 2 --times 1` is asked first for the API's groups, by kubectl."""
    rules = [Rule(do=action, times=1)]
    assert choose(rules, method="GET", path="/apis", watch=False) is None
    assert choose(rules, method="GET", path="/api/v1/pods", watch=True) == action
