"""Debian's Prometheus in the hub: scrapes the API server, the kubelets and pods that ask for it. `Cluster` calls this.

The package is unpacked into the cache and not installed: on a machine with systemd an installation would start a server
on the machine's port 9090.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tools.testcluster import binaries, commands
from tools.testcluster.errors import CommandFailed, MissingRequirement
from tools.testcluster.layout import Addresses, Paths

PORT = 9090


def programs(*, report: Callable[[str], None]) -> Path:
    """The folder with `prometheus` and `promtool`."""
    where = binaries.cache_root() / "prometheus"
    if not where.is_dir():
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
            shutil.move(Path(scratch) / "root", where)
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


def config(paths: Paths, addresses: Addresses, *, nodes: int) -> str:
    tls = {
        "ca_file": f"{paths.pki}/ca.crt",
        "cert_file": f"{paths.pki}/admin.crt",
        "key_file": f"{paths.pki}/admin.key",
    }
    asks = "__meta_kubernetes_pod_annotation_prometheus_io_"
    pods: dict[str, Any] = {
        "job_name": "pods",
        "kubernetes_sd_configs": [{"role": "pod", "api_server": addresses.server, "tls_config": tls}],
        "relabel_configs": [
            {"source_labels": [f"{asks}scrape"], "action": "keep", "regex": "true"},
            {"source_labels": [f"{asks}path"], "target_label": "__metrics_path__", "regex": "(.+)"},
            {
                "source_labels": ["__meta_kubernetes_pod_ip", f"{asks}port"],
                "separator": ":",
                "regex": r"(.+:\d+)",
                "target_label": "__address__",
            },
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
        ],
    }
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
