"""An HTTP server that refuses: `with RefusingStore(status=507, code="XMinioStorageFull") as store: store.variables`.

With status 0 it takes half of what it is sent and cuts the connection; with None it takes all, and never answers.
`asked`: methods and paths so far.
"""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


class RefusingStore:
    def __init__(self, *, status: int | None = 0, code: str = "") -> None:
        self.asked: list[str] = []
        self.over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                outer.asked.append(f"{self.command} {self.path}")
                length = int(self.headers.get("Content-Length") or 0)
                if status is None:
                    self.rfile.read(length)
                    outer.over.wait(60)
                    return
                if not status:
                    self.rfile.read(length // 2)
                    self.close_connection = True
                    return
                self.rfile.read(length)
                key = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
                body = f"<Error><Code>{code}</Code><Message>no</Message><AWSAccessKeyId>{key}</AWSAccessKeyId></Error>"
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode() if self.command != "HEAD" else b"")

            do_GET = do_PUT = do_POST = do_HEAD = answer

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    def __enter__(self) -> "RefusingStore":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def variables(self) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": "made-up-id", "AWS_SECRET_ACCESS_KEY": "made-up-secret"}
        return {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}", "AWS_REGION": "us-east-1"}
