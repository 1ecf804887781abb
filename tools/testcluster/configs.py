"""Command lines and configuration files of every component. Pure: text in, text out; `Cluster` writes and starts them.

What is not obvious here was found by running it; each such setting says why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tools.testcluster.layout import Addresses, Options, Paths, node_name

PAUSE_IMAGE = "localhost/pause:1"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
CNI_PLUGINS = "/usr/lib/cni"
GANG_GATES = ("GenericWorkload=true", "GangScheduling=true")
GANG_API = "scheduling.k8s.io/v1alpha2=true"
STATUS_UPDATE_S = 4
KWOK_GRACE_PERIOD_S = 40


def feature_gates(options: Options) -> list[str]:
    gates = (*(GANG_GATES if options.gang_scheduling else ()), *options.feature_gates)
    return [f"--feature-gates={','.join(gates)}"] if gates else []


def feature_gates_of_nodes(options: Options) -> dict[str, bool]:
    """Without those of gangs, which nodes have no part in."""
    pairs = (gate.split("=") for gate in options.feature_gates)
    return {name: value == "true" for name, value in pairs}


def etcd(paths: Paths) -> list[str]:
    # A test cluster's data need not survive a power cut; `up` after one starts from nothing.
    return [
        "etcd",
        f"--data-dir={paths.etcd}",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
        "--log-level=warn",
        "--quota-backend-bytes=4294967296",
    ]


def apiserver(paths: Paths, addresses: Addresses, options: Options) -> list[str]:
    pki = paths.pki
    runtime = (*((GANG_API,) if options.gang_scheduling else ()), *options.runtime_config)
    words = [
        "kube-apiserver",
        "--etcd-servers=http://127.0.0.1:2379",
        "--bind-address=0.0.0.0",
        "--secure-port=6443",
        f"--advertise-address={addresses.hub}",  # must not be loopback: it becomes the `kubernetes` Service's endpoint
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--kubelet-client-certificate={pki}/apiserver-to-kubelet.crt",
        f"--kubelet-client-key={pki}/apiserver-to-kubelet.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/service-accounts.pub",
        f"--service-account-signing-key-file={pki}/service-accounts.key",
        f"--service-cluster-ip-range={addresses.services}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--enable-aggregator-routing=true",  # the hub has no kube-proxy, so webhooks are called at their pods
        "--allow-privileged=true",
        "--profiling=false",
        *feature_gates(options),
    ]
    if runtime:
        words.append(f"--runtime-config={','.join(runtime)}")
    if options.audit:
        words += [f"--audit-policy-file={paths.config}/audit.yaml", f"--audit-log-path={paths.logs}/audit.log"]
    return words


def audit_policy() -> str:
    """Who did what to which object, without bodies; reads of the components themselves are left out."""
    policy: dict[str, Any] = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "None", "userGroups": ["system:nodes"]},
            {"level": "None", "users": ["system:kube-scheduler", "system:kube-controller-manager"], "verbs": ["get"]},
            {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
            {"level": "Metadata"},
        ],
    }
    return yaml.safe_dump(policy)


def controller_manager(paths: Paths, options: Options) -> list[str]:
    # kwok renews its leases every 10 s, so a shorter grace period would make its nodes flap.
    grace_s = max(options.node_monitor_grace_period_s, KWOK_GRACE_PERIOD_S if options.kwok_nodes else 0)
    return [
        "kube-controller-manager",
        f"--kubeconfig={paths.pki}/controller-manager.kubeconfig",
        f"--service-account-private-key-file={paths.pki}/service-accounts.key",
        f"--root-ca-file={paths.pki}/ca.crt",
        f"--cluster-signing-cert-file={paths.pki}/ca.crt",
        f"--cluster-signing-key-file={paths.pki}/ca.key",
        "--use-service-account-credentials=true",
        "--allocate-node-cidrs=false",
        "--leader-elect=false",
        f"--node-monitor-grace-period={grace_s}s",
        "--node-monitor-period=1s",
        "--bind-address=127.0.0.1",
        # The defaults (20 and 30 a second) would be what a scale test measures.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        *feature_gates(options),
    ]


def scheduler(paths: Paths, options: Options) -> list[str]:
    return [
        "kube-scheduler",
        f"--kubeconfig={paths.pki}/scheduler.kubeconfig",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        *feature_gates(options),
    ]


def coredns(paths: Paths) -> list[str]:
    return ["coredns", "-conf", f"{paths.config}/Corefile", "-quiet"]


def corefile(paths: Paths, addresses: Addresses) -> str:
    """Cluster names from the API server; any other does not exist (without the second block it would be EAI_AGAIN)."""
    return f"""\
cluster.local:53 in-addr.arpa:53 {{
    bind {addresses.hub}
    errors
    health {addresses.hub}:8080
    ready {addresses.hub}:8181
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {paths.pki}/coredns.kubeconfig
        pods insecure
        ttl 5
    }}
    cache 5 cluster.local {{
        denial 1000 1
    }}
}}
.:53 {{
    bind {addresses.hub}
    errors
    loop
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def containerd(paths: Paths, *, index: int) -> str:
    return f"""\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs"]

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"  # the default lies on the machine's own disk

[plugins."io.containerd.nri.v1.nri"]
  disable = true

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true  # where root may not lower it, no container would start

  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{CNI_PLUGINS}"]
    conf_dir = "{paths.config}/{node_name(index)}/cni"

  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"

    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


def cni(addresses: Addresses, *, index: int) -> str:
    """A bridge per node. No masquerading: every pod address is routed, so policies and logs see who really calls."""
    plugins: list[dict[str, Any]] = [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": "/var/lib/cni/networks",
                "ranges": [[{"subnet": addresses.node_pods(index)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}, indent=2)


def kubelet(paths: Paths, addresses: Addresses, *, index: int) -> list[str]:
    name = node_name(index)
    return [
        "kubelet",
        f"--config={paths.config}/{name}/kubelet.yaml",
        f"--kubeconfig={paths.pki}/{name}.kubeconfig",
        f"--hostname-override={name}",
        f"--node-ip={addresses.node(index)}",
        "--root-dir=/var/lib/kubelet",
        "--cert-dir=/var/lib/kubelet/pki",
    ]


def kubelet_config(paths: Paths, addresses: Addresses, options: Options, *, index: int) -> str:
    name = node_name(index)
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{paths.pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        # It has its own: a second kubelet in the same one takes the first one's pods for orphans and kills them.
        "cgroupRoot": f"/{paths.cgroup}/{name}",
        "cgroupsPerQOS": True,
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "5%", "imagefs.available": "5%"},
        "evictionPressureTransitionPeriod": "5s",
        "clusterDNS": [addresses.dns_service],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "tlsCertFile": f"{paths.pki}/{name}.crt",
        "tlsPrivateKeyFile": f"{paths.pki}/{name}.key",
        # Nothing can be pulled again, so no image is ever collected.
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": f"{STATUS_UPDATE_S}s",
        # Renewed at a quarter of this, well inside the shortest grace period.
        "nodeLeaseDurationSeconds": max(4, options.node_monitor_grace_period_s),
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",  # the default lies on the machine's own disk
        "registerWithTaints": [],
    }
    if gates := feature_gates_of_nodes(options):
        config["featureGates"] = gates
    return yaml.safe_dump(config)


def kube_proxy(paths: Paths, addresses: Addresses, options: Options, *, index: int) -> list[str]:
    gates = ",".join(f"{name}={str(value).lower()}" for name, value in feature_gates_of_nodes(options).items())
    return [
        "kube-proxy",
        f"--kubeconfig={paths.pki}/proxy.kubeconfig",
        f"--cluster-cidr={addresses.pods}",
        f"--hostname-override={node_name(index)}",
        "--proxy-mode=iptables",
        # These sysctls cannot be written in a network namespace that is not the machine's.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        *([f"--feature-gates={gates}"] if gates else []),
    ]


def rights() -> list[tuple[str, dict[str, Any]]]:
    """What a cluster must hold before its components work: path and object, for server-side apply."""
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    reads = ["list", "watch"]
    return [
        (
            f"{rbac}/clusterrolebindings/testcluster:apiserver-to-kubelet",
            _binding("testcluster:apiserver-to-kubelet", "system:kubelet-api-admin", "kube-apiserver-kubelet-client"),
        ),
        (
            f"{rbac}/clusterroles/testcluster:coredns",
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRole",
                "metadata": {"name": "testcluster:coredns"},
                "rules": [
                    {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": reads},
                    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": reads},
                ],
            },
        ),
        (
            f"{rbac}/clusterrolebindings/testcluster:coredns",
            _binding("testcluster:coredns", "testcluster:coredns", "testcluster:coredns"),
        ),
    ]


def _binding(name: str, role: str, user: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }


def dns_service(addresses: Addresses) -> list[tuple[str, dict[str, Any]]]:
    """kube-dns without a selector: CoreDNS is a process of the hub, not a pod."""
    ports = [("dns", "UDP"), ("dns-tcp", "TCP")]
    return [
        (
            "/api/v1/namespaces/kube-system/services/kube-dns",
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}},
                "spec": {
                    "clusterIP": addresses.dns_service,
                    "ports": [{"name": name, "port": 53, "targetPort": 53, "protocol": kind} for name, kind in ports],
                },
            },
        ),
        (
            "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices/kube-dns-hub",
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": "kube-dns-hub",
                    "namespace": "kube-system",
                    "labels": {"kubernetes.io/service-name": "kube-dns"},
                },
                "addressType": "IPv4",
                "endpoints": [{"addresses": [addresses.hub], "conditions": {"ready": True}}],
                "ports": [{"name": name, "port": 53, "protocol": kind} for name, kind in ports],
            },
        ),
    ]


def write(paths: Paths, addresses: Addresses, options: Options) -> None:
    """Every file that the command lines above name, but the certificates."""
    paths.config.mkdir(parents=True, exist_ok=True)
    _put(paths.config / "Corefile", corefile(paths, addresses))
    _put(paths.config / "audit.yaml", audit_policy())
    for index in range(options.nodes):
        folder = paths.config / node_name(index)
        _put(folder / "containerd.toml", containerd(paths, index=index))
        _put(folder / "kubelet.yaml", kubelet_config(paths, addresses, options, index=index))
        _put(folder / "cni" / "10-pods.conflist", cni(addresses, index=index))


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
