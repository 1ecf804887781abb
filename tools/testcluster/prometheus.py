"""Debian's Prometheus in the hub: scrapes the API server, the kubelets and pods that ask for it. `Cluster` calls this.

The package is unpacked into the cache and not installed: on a machine with systemd an installation would start a server
on the machine's port 9090.

Debian builds it without Kubernetes service discovery. `main`, a daemon of the hub, does that part: it lists pods that
are annotated `prometheus.io/scrape: "true"` (with `prometheus.io/port`, and `prometheus.io/path` if not /metrics) into
a file that Prometheus watches.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tools.testcluster import binaries, commands, seals
from tools.testcluster.api import Api, ApiError
from tools.testcluster.errors import CommandFailed, MissingRequirement
from tools.testcluster.layout import Addresses, Paths

PORT = 9090
POLL_S = 1.0


def programs(*, report: Callable[[str], None]) -> Path:
    """The folder with `prometheus` and `promtool`."""
    where = binaries.cache_root() / "prometheus"
    if not seals.is_whole(where):
        report("fetching the Debian package prometheus")
        where.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=where.parent, prefix=".prometheus-") as scratch:
            # apt's own user may not write into a folder of root's, and says so on every download.
            download = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "prometheus"]
            try:
                commands.run(download, cwd=Path(scratch), timeout_s=300)
            except CommandFailed:
                try:
                    commands.run(["apt-get", "update"], timeout_s=300)
                    commands.run(download, cwd=Path(scratch), timeout_s=300)
                except CommandFailed as err:
                    raise MissingRequirement(f"the Debian package prometheus could not be fetched: {err}") from err
            package = next(Path(scratch).glob("prometheus_*.deb"))
            commands.run(["dpkg", "-x", package, Path(scratch) / "root"])
            shutil.rmtree(where, ignore_errors=True)  # torn, if it is there
            seals.move(Path(scratch) / "root", where)
    return where / "usr" / "bin"


def words(folder: Path, paths: Paths, addresses: Addresses) -> list[str]:
    return [
        str(folder / "prometheus"),
        f"--config.file={paths.config}/prometheus.yaml",
        f"--storage.tsdb.path={paths.root}/prometheus",
        f"--web.listen-address={addresses.hub}:{PORT}",
        "--storage.tsdb.retention.time=1d",
        "--web.enable-lifecycle",
    ]


def targets_file(config_folder: Path) -> Path:
    return config_folder / "targets.json"


def targets(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Running pods that ask to be scraped, as `file_sd_configs` wants them."""
    found = []
    for pod in pods:
        asks, status = pod["metadata"].get("annotations", {}), pod.get("status", {})
        if asks.get("prometheus.io/scrape") == "true" and status.get("podIP") and status.get("phase") == "Running":
            labels = {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"]}
            if "prometheus.io/path" in asks:
                labels["__metrics_path__"] = asks["prometheus.io/path"]
            address = f"{status['podIP']}:{asks.get('prometheus.io/port', '80')}"
            found.append({"targets": [address], "labels": labels})
    return found


def config(paths: Paths, addresses: Addresses, *, nodes: int) -> str:
    tls = {
        "ca_file": f"{paths.pki}/ca.crt",
        "cert_file": f"{paths.pki}/admin.crt",
        "key_file": f"{paths.pki}/admin.key",
    }
    pods = {"job_name": "pods", "file_sd_configs": [{"files": [str(targets_file(paths.config))]}]}
    kubelets = [f"{addresses.node(index)}:10250" for index in range(nodes)]
    return yaml.safe_dump(
        {
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
            "scrape_configs": [
                pods,
                {
                    "job_name": "apiserver",
                    "scheme": "https",
                    "tls_config": tls,
                    "static_configs": [{"targets": [addresses.server.removeprefix("https://")]}],
                },
                {
                    "job_name": "kubelets",
                    "scheme": "https",
                    "tls_config": tls,
                    "static_configs": [{"targets": kubelets}],
                },
            ],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Tells Prometheus which pods of a test cluster to scrape.")
    parser.add_argument("--server", required=True)
    parser.add_argument("--pki", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    pki = arguments.pki
    api = Api(arguments.server, ca=pki / "ca.crt", certificate=pki / "admin.crt", key=pki / "admin.key")
    written = ""
    while True:
        try:
            text = json.dumps(targets(api.get("/api/v1/pods")["items"]))
        except ApiError as err:  # it may be down on purpose: the targets stay as they are
            print(err, file=sys.stderr, flush=True)
        else:
            if text != written:
                scratch = arguments.out.with_suffix(".tmp")
                scratch.write_text(text, encoding="utf-8")
                scratch.replace(arguments.out)
                written = text
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
