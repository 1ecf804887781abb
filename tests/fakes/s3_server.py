"""An S3 server of its own process, as checkpoints meet one: `with S3Server() as s3: s3.variables, s3.names("bucket")`.

It is moto's. A client of ours has its endpoint and made-up keys; a test reads past it, by the server's own HTTP.
`python -m tests.fakes.s3_server` is that process; it ends with its standard input.
"""

import os
import subprocess
import sys
import urllib.request
import xml.etree.ElementTree as ET
from types import TracebackType

READY_S = 30.0
"""From the start of Python to the first answer: 2 s on an idle machine."""


class S3Server:
    def __enter__(self) -> "S3Server":
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        command = [sys.executable, "-W", "ignore", "-m", "tests.fakes.s3_server"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()  # empty: it has ended
        assert self.address, f"no S3 server: exit code {self._process.wait(READY_S)}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate(timeout=READY_S)

    @property
    def variables(self) -> dict[str, str]:
        """What a pod has of its store."""
        keys = {"AWS_ACCESS_KEY_ID": "made-up-id", "AWS_SECRET_ACCESS_KEY": "made-up-secret"}
        return {**keys, "AWS_ENDPOINT_URL": self.address, "AWS_REGION": "us-east-1"}

    def ask(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(f"{self.address}/{path}", method=method)
        with urllib.request.urlopen(request, timeout=READY_S) as answer:
            return bytes(answer.read())

    def make_bucket(self, bucket: str) -> None:
        self.ask("PUT", bucket)

    def names(self, bucket: str) -> list[str]:
        found = ET.fromstring(self.ask("GET", f"{bucket}?list-type=2"))
        return [element.text or "" for element in found.iter() if element.tag.endswith("}Key")]

    def unfinished(self, bucket: str) -> list[str]:
        """Multi-part uploads that nobody has completed: no listing shows them."""
        found = ET.fromstring(self.ask("GET", f"{bucket}?uploads"))
        return [element.text or "" for element in found.iter() if element.tag.endswith("}Key")]


def main() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(f"http://{host}:{port}", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
