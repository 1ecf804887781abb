"""Every string that two parts must spell alike: group and version, labels, annotations, object names, ports, the pod
contract (environment table, mounts, uid, exit codes). Pod builder, agents, workers and the local backend read it here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple, NewType

JobUid = NewType("JobUid", str)
WorkerId = NewType("WorkerId", str)  # role/number, e.g. "rollout/3": see worker_id()

GROUP: Final = "rlinf.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
PROTOCOL: Final = 1  # every hello and welcome says it; a part that speaks another one is refused with a sentence
MANAGER: Final = "rlinf-operator"
OPERATOR: Final = "rlinf.io/operator"  # spec.managedBy of the jobs that are ours

# --- labels and annotations -------------------------------------------------------------------------------------------
LABEL_JOB: Final = f"{GROUP}/job"
LABEL_JOB_UID: Final = f"{GROUP}/job-uid"
LABEL_COMPONENT: Final = f"{GROUP}/component"  # driver | worker
LABEL_POOL: Final = f"{GROUP}/pool"
LABEL_ORDINAL: Final = f"{GROUP}/ordinal"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
ANNOTATION_INPUTS: Final = (
    f"{GROUP}/inputs-hash"  # what of the job a pod was made from, a hash of each field; compared, never re-rendered
)
ANNOTATION_LIFE: Final = f"{GROUP}/life"  # life of the job (suspend/resume, restart as a whole) a pod belongs to
ANNOTATION_APPROVED_BY: Final = f"{GROUP}/approved-by"  # on an RLPlan: who lets it come into force (apply: OnApproval)
ANNOTATION_STAYS: Final = f"{GROUP}/stays"  # on an RLPlan, by the scheduler: "CODE: why no other replaces it"
ANNOTATION_FEWEST: Final = (
    f"{GROUP}/fewest-pods"  # on an RLPlan, by the scheduler: {"gpu": 2}, with fewer there is none
)
MAX_STAYS: Final = 500  # characters of it, which anybody may write: some sentences
ANNOTATION_CERT_EXPIRY: Final = f"{GROUP}/certificate-expires"
LABEL_QUEUE: Final = "kueue.x-k8s.io/queue-name"  # on an RLJob: the LocalQueue that it waits in
LABEL_QUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"  # on an RLJob: its WorkloadPriorityClass
ANNOTATION_CERT_ISSUER: Final = f"{GROUP}/certificate-issuer"  # fingerprint of the CA that signed a job's certificates

COMPONENT_DRIVER: Final = "driver"
COMPONENT_WORKER: Final = "worker"

# --- object names -----------------------------------------------------------------------------------------------------
MAX_JOB_NAME: Final = 40  # <job>-<pool>-<ordinal>-a<attempt> must stay a DNS label (63)
MAX_POOL_NAME: Final = 12


def driver_pod(job: str, attempt: int) -> str:
    return f"{job}-driver-a{attempt}"


def worker_pod(job: str, pool: str, *, ordinal: int, attempt: int) -> str:
    return f"{job}-{pool}-{ordinal}-a{attempt}"


def plan_name(job: str, revision: int) -> str:
    return f"{job}-p{revision}"


def profile_name(key: str) -> str:
    """What was measured of jobs with this key (profile.key_of); half of the hash, as names have at most 63 characters.

    >>> profile_name("sha256:" + 64 * "7")
    'profile-77777777777777777777777777777777'
    """
    return f"profile-{key.removeprefix('sha256:')[:32]}"


def service_name(job: str) -> str:
    """The headless Service under which all pods of a job have names."""
    return job


def network_policy_name(job: str) -> str:
    """The policy that keeps strangers from the job's pods."""
    return job


def disruption_budget_name(job: str) -> str:
    """The budget that keeps its driver from evictions."""
    return job


def workload_name(job: str) -> str:
    """What the job's queue is asked for."""
    return f"rljob-{job}"


def config_name(job: str) -> str:
    """ConfigMap with job.json; created after the job's Secrets, so that its existence says that they were made."""
    return f"{job}-job"


def secret_name(job: str, part: str, *, uid: str) -> str:
    """Certificate Secret of one part; carries the job's uid, so that a 409 can only be its own."""
    return f"{job}-{part.replace(':', '-')}-{uid[:8]}"


def pod_hostname(part: str, ordinal: int | None = None) -> str:
    """DNS label below the headless service: `driver`, or `<pool>-<ordinal>`: by ordinal, so a replacement keeps it."""
    return part if ordinal is None else f"{part}-{ordinal}"


def pod_dns(hostname: str, *, job: str, namespace: str) -> str:
    return f"{hostname}.{service_name(job)}.{namespace}.svc"


def worker_id(role: str, number: int) -> WorkerId:
    return WorkerId(f"{role}/{number}")


SPARE_MARK: Final = "spare."
"""Before the role in a warm spare's name: no role's name has a dot."""


def spare_id(role: str, number: int) -> WorkerId:
    """A warm spare of one pod; other pods have spares of the same name.

    >>> spare_id("rollout", 0)
    'spare.rollout/0'
    """
    return WorkerId(f"{SPARE_MARK}{role}/{number}")


def is_spare(worker: str) -> bool:
    return worker.startswith(SPARE_MARK)


def split_worker_id(worker: str) -> tuple[str, int]:
    role, _, number = worker.rpartition("/")
    return role, int(number)


def spiffe_id(namespace: str, job_uid: str, part: str) -> str:
    """URI SAN of a leaf certificate. `part` is driver, operator, scheduler or pool:<name>.

    >>> spiffe_id("team", "1b4e", "pool:gpu")
    'spiffe://rlinf.io/ns/team/job/1b4e/part/pool:gpu'
    """
    return f"spiffe://{GROUP}/ns/{namespace}/job/{job_uid}/part/{part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartIdentity:
    """Who a certificate says it is. Operator and scheduler serve all jobs: their namespace and job are `*`."""

    namespace: str
    job_uid: str
    part: str


def tls_name(part: str, job_uid: str = "*") -> str:
    """DNS SAN of a leaf certificate, which a caller demands of the server it dials: part and job, never an address.

    >>> tls_name("driver", "1b4e"), tls_name("scheduler")
    ('driver.1b4e.rlinf.io', 'scheduler.rlinf.io')
    """
    label = part.replace(":", "-")
    return f"{label}.{GROUP}" if job_uid == "*" else f"{label}.{job_uid}.{GROUP}"


_SPIFFE = re.compile(rf"spiffe://{re.escape(GROUP)}/ns/([^/]+)/job/([^/]+)/part/([a-z0-9:.-]+)")


def parse_spiffe_id(uri: str) -> PartIdentity | None:
    """None for a URI that is not one of ours; the caller refuses such a certificate."""
    match = _SPIFFE.fullmatch(uri)
    return PartIdentity(namespace=match[1], job_uid=match[2], part=match[3]) if match else None


# --- the pod contract -------------------------------------------------------------------------------------------------
CONTAINER_DRIVER: Final = "driver"
CONTAINER_AGENT: Final = "agent"
PORT_DRIVER_GRPC: Final = 7070
PORT_METRICS: Final = 7072  # driver and agent; also on the pod's loopback, for a port-forward
PORT_DATA_BASE: Final = 7100  # worker on slot k of a pod listens on PORT_DATA_BASE + k
POD_UID: Final = 65532  # user and group of every container

MOUNT_RUN: Final = "/run/rlinf"  # emptyDir: sockets, last words; sized
MOUNT_SHM: Final = "/dev/shm"  # emptyDir, medium Memory: rings
MOUNT_TMP: Final = "/tmp"  # emptyDir, as the root file system is read-only
MOUNT_TLS: Final = "/etc/rlinf/tls"  # Secret: ca.crt tls.crt tls.key
MOUNT_JOB: Final = "/etc/rlinf/job"  # ConfigMap: job.json
JOB_FILE: Final = "job.json"
PROFILES_FILE: Final = "profiles.jsonl"  # in the work dir of a local run: what its scheduler knows, the newest last
MOUNT_CACHE: Final = "/var/cache/rlinf"  # emptyDir: bytecode and kernels
TERMINATION_LOG: Final = "/run/rlinf/termination.json"


class Env(NamedTuple):
    """One line of the pod contract: who sets it, who reads it, what it means, the default where it may be absent."""

    name: str
    set_by: str
    read_by: str
    meaning: str
    default: str | None = None


ENV_JOB_NAME: Final = "RLINF_JOB_NAME"
ENV_JOB_UID: Final = "RLINF_JOB_UID"
ENV_JOB_FILE: Final = "RLINF_JOB_FILE"
ENV_NAMESPACE: Final = "RLINF_NAMESPACE"
ENV_POD_NAME: Final = "RLINF_POD_NAME"
ENV_POD_UID: Final = "RLINF_POD_UID"
ENV_POD_IP: Final = "RLINF_POD_IP"
ENV_NODE_NAME: Final = "RLINF_NODE_NAME"
ENV_ATTEMPT: Final = "RLINF_ATTEMPT"
ENV_LIFE: Final = "RLINF_LIFE"
ENV_FIRST_OF_LIFE: Final = "RLINF_FIRST_OF_LIFE"
ENV_POOL: Final = "RLINF_POOL"
ENV_ORDINAL: Final = "RLINF_ORDINAL"
ENV_SLOTS: Final = "RLINF_SLOTS"
ENV_SLOT_RESOURCE: Final = "RLINF_SLOT_RESOURCE"
ENV_GRACE: Final = "RLINF_GRACE_S"
ENV_DRIVER_ADDRESS: Final = "RLINF_DRIVER_ADDRESS"
ENV_SCHEDULER_ADDRESS: Final = "RLINF_SCHEDULER_ADDRESS"
ENV_RUN_DIR: Final = "RLINF_RUN_DIR"
ENV_SHM_DIR: Final = "RLINF_SHM_DIR"
ENV_CACHE_DIR: Final = "RLINF_CACHE_DIR"
ENV_TLS_DIR: Final = "RLINF_TLS_DIR"
ENV_TERMINATION_LOG: Final = "RLINF_TERMINATION_LOG"
ENV_CHECKPOINT_URI: Final = "RLINF_CHECKPOINT_URI"
ENV_OUTPUT_DIR: Final = "RLINF_OUTPUT_DIR"
ENV_HOSTS_FILE: Final = "RLINF_HOSTS_FILE"
ENV_WORKER_LOG_DIR: Final = "RLINF_WORKER_LOG_DIR"
ENV_LOG_LEVEL: Final = "RLINF_LOG_LEVEL"
ENV_LINK_BULK: Final = "RLINF_LINK_BULK"
ENV_LINK_GPU: Final = "RLINF_LINK_GPU"
ENV_SETTINGS: Final = "RLINF_SETTINGS"
ENV_WORKER_ID: Final = "RLINF_WORKER_ID"
ENV_WORKER_ROLE: Final = "RLINF_WORKER_ROLE"
ENV_WORKER_KIND: Final = "RLINF_WORKER_KIND"
ENV_WORKER_RANK: Final = "RLINF_WORKER_RANK"
ENV_WORKER_WORLD: Final = "RLINF_WORKER_WORLD"
ENV_WORKER_ATTEMPT: Final = "RLINF_WORKER_ATTEMPT"
ENV_WORKER_SLOTS: Final = "RLINF_WORKER_SLOTS"
ENV_WORKER_CONFIG: Final = "RLINF_WORKER_CONFIG"
ENV_WORKER_SPARE: Final = "RLINF_WORKER_SPARE"
ENV_DEVICES: Final = "RLINF_DEVICES"
ENV_SLOTS_SOCKET: Final = "RLINF_SLOTS_SOCKET"
ENV_AGENT_PID: Final = "RLINF_AGENT_PID"
ENV_AGENT_MARK: Final = "RLINF_AGENT_MARK"

ENVIRONMENT: Final[tuple[Env, ...]] = (
    Env(ENV_JOB_NAME, "manifests", "driver, agent", "metadata.name of the RLJob"),
    Env(ENV_JOB_UID, "manifests", "driver, agent, worker", "metadata.uid of the RLJob; every hello carries it"),
    Env(ENV_JOB_FILE, "manifests", "driver, agent", "job.json: the RLJob's spec, without what is at its default"),
    Env(ENV_NAMESPACE, "fieldRef", "driver, agent", "the job's namespace"),
    Env(ENV_POD_NAME, "fieldRef", "agent", "this pod's name, for messages"),
    Env(ENV_POD_UID, "fieldRef", "agent, worker", "decides whether two workers share a pod; marks its processes"),
    Env(ENV_POD_IP, "fieldRef", "driver, agent, worker", "the address to listen on"),
    Env(ENV_NODE_NAME, "fieldRef", "agent", "the node's name, for messages", ""),
    Env(ENV_ATTEMPT, "manifests", "driver, agent, worker", "life number of the pod; fences senders"),
    Env(ENV_LIFE, "manifests", "driver", "life of the job (suspend and resume, restart as a whole)", "1"),
    Env(ENV_FIRST_OF_LIFE, "manifests", "driver", "1: no pod of this life was there before it, nobody knows more", ""),
    Env(ENV_POOL, "manifests", "agent, worker", "pool of a worker pod"),
    Env(ENV_ORDINAL, "manifests", "agent", "ordinal of a worker pod in its pool"),
    Env(ENV_SLOTS, "manifests", "agent", "slots of this pod"),
    Env(ENV_SLOT_RESOURCE, "manifests", "agent", "extended resource of each; empty: shares of CPU", ""),
    Env(ENV_GRACE, "manifests", "agent", "seconds of the pod's grace, by its template; empty: unknown", ""),
    Env(ENV_DRIVER_ADDRESS, "manifests", "agent, worker", "host:port of the driver, by ordinal-stable DNS name"),
    Env(ENV_SCHEDULER_ADDRESS, "manifests", "driver", "host:port of the scheduler; empty: no profiles", ""),
    Env(ENV_RUN_DIR, "manifests", "driver, agent, worker", "sockets and last words", MOUNT_RUN),
    Env(ENV_SHM_DIR, "manifests", "worker", "where shared-memory rings are made", MOUNT_SHM),
    Env(ENV_CACHE_DIR, "manifests", "agent", "bytecode of a read-only installation that has none; empty: nowhere", ""),
    Env(ENV_TLS_DIR, "manifests", "driver, agent, worker", "ca.crt, tls.crt, tls.key", MOUNT_TLS),
    Env(
        ENV_TERMINATION_LOG,
        "manifests",
        "driver, agent",
        "termination message: JSON of the first failure",
        TERMINATION_LOG,
    ),
    Env(ENV_CHECKPOINT_URI, "manifests", "driver, worker", "where checkpoints go; empty: none are written", ""),
    Env(ENV_OUTPUT_DIR, "local backend", "driver, worker", "metrics.jsonl, samples.jsonl; empty: only /metrics", ""),
    Env(ENV_HOSTS_FILE, "local backend", "driver, agent, worker", "hosts(5) file consulted before DNS", ""),
    Env(ENV_WORKER_LOG_DIR, "local backend", "agent", "a log file per worker here; empty: the pod's own log", ""),
    Env(ENV_LOG_LEVEL, "template", "driver, agent, worker", "DEBUG, INFO, WARNING or ERROR", "INFO"),
    Env(ENV_LINK_BULK, "template", "worker", "large buffers between pods: plain or tls (encrypted)", "plain"),
    Env(ENV_LINK_GPU, "template", "worker", "buffers on a GPU: direct (CUDA IPC, NCCL) or host", "direct"),
    Env(ENV_SETTINGS, "template", "driver, agent, worker", "JSON: fields of rlinf_worker.settings.Settings", ""),
    # What an agent adds to its own environment for a worker that it starts.
    Env(ENV_WORKER_ID, "agent", "worker", "role/number, for example rollout/3"),
    Env(ENV_WORKER_ROLE, "agent", "worker", "name of its role"),
    Env(ENV_WORKER_KIND, "agent", "worker", "registered kind of the role, or module:Class"),
    Env(ENV_WORKER_RANK, "agent", "worker", "rank in its gang"),
    Env(ENV_WORKER_WORLD, "agent", "worker", "size of its gang"),
    Env(ENV_WORKER_ATTEMPT, "agent", "worker", "life number of the worker; RLINF_ATTEMPT stays the pod's"),
    Env(ENV_WORKER_SLOTS, "agent", "worker", "indices of its slots in this pod: 0,1"),
    Env(ENV_DEVICES, "agent", "worker", "UUIDs of the pod's GPUs, one per slot; empty: none", ""),
    Env(ENV_WORKER_CONFIG, "agent", "worker", "file with the role's config as JSON"),
    Env(ENV_WORKER_SPARE, "agent", "worker", "of a warm spare: file with the flow's settings; empty: a worker", ""),
    Env(ENV_SLOTS_SOCKET, "agent", "worker", "path of the unix socket that serves rlinf.slots.v1alpha1.Slots"),
    Env(ENV_AGENT_PID, "agent", "worker", "pid of its agent; a worker with another parent is an orphan and exits"),
    Env(ENV_AGENT_MARK, "agent", "agent", "marks the processes of one life of an agent, to find them when it is dead"),
)

EXIT_OK: Final = 0
EXIT_USER_ERROR: Final = 64  # the manifest or the user's code must change: do not restart
EXIT_BUG: Final = 70  # InvariantBroken
EXIT_RETRYABLE: Final = 75  # restart may help
EXIT_STALE: Final = 76  # a newer attempt of this pod exists: exit and stay away
EXIT_TERMINATED: Final = 143  # SIGTERM was obeyed: never 0, a drained pod must not look successful

MAX_TERMINATION_BYTES: Final = 4096  # the kubelet's limit
