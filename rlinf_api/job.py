"""What a user may write: the RLJob. pydantic models from which the CRD is generated (tools/gen_crds.py).

Unknown keys are errors. A rule that the API server can check is CEL here (`cel(...)`), with a message that names the
field and the remedy; `edits.py` has those about an edit, `job_rules.py` what CEL cannot say. Nothing in here knows
which flows or role kinds exist: that is `flows.py`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from rlinf_api import flows, names, quantities
from rlinf_api.conditions import Condition, Time

NAME_PATTERN: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
RESOURCE_PATTERN: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL_KEY_PATTERN: Final = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
CONTROLLER_PATTERN: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?$"
RUNTIME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
PRESERVE: Final = {"x-kubernetes-preserve-unknown-fields": True}
UNSAID: Final[JsonDict] = {"default": None}
"""The schema of a field whose default the API server does not write into a job: what is not there, the job's runtime
may say."""


def cel(rule: str, message: str) -> JsonDict:
    """One x-kubernetes-validations entry."""
    return {"rule": rule, "message": message}


def roles_in_cel(spec: str, *, with_kinds: bool = False) -> str:
    """The names of a spec's roles, or "name:kind", as a list in CEL: as written, or the defaults of its flow."""
    listed = {flow: flows.roles_of(flow).items() for flow in flows.WITH_ROLES}
    known = {flow: [f"{n}:{kind}" if with_kinds else n for n, kind in roles] for flow, roles in listed.items()}
    written = "r.name + ':' + r.kind" if with_kinds else "r.name"
    name = f"{spec}.flow.name"
    return f"({spec}.roles.size() > 0 ? {spec}.roles.map(r, {written}) : ({name} in {known} ? {known}[{name}] : []))"


def by(key: str) -> JsonDict:
    """A list whose entries Kubernetes tells apart by this field: two of one key are refused, patches merge by it."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=True, frozen=True, use_attribute_docstrings=True
    )


Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=names.MAX_POOL_NAME)]
Quantity = Annotated[
    str,
    Field(max_length=24, json_schema_extra={"pattern": quantities.PATTERN}),
    AfterValidator(quantities.checked),
]
MaybeQuantity = Annotated[
    str,
    Field(max_length=24, json_schema_extra={"pattern": f"^$|{quantities.PATTERN}"}),
    AfterValidator(lambda text: quantities.checked(text) if text else text),
]
Config = Annotated[dict[str, JsonValue], Field(json_schema_extra=dict(PRESERVE))]


Template = Annotated[
    dict[str, JsonValue],
    Field(
        json_schema_extra={
            **PRESERVE, "properties": {part: {"type": "object", **PRESERVE} for part in ("metadata", "spec")},
        }
    ),
]  # fmt: skip
"""Free-form; its two parts are named so that CEL sees them."""


class Range(Model):
    """From min to max, both included; the plan chooses."""

    min: Annotated[int, Field(ge=0, le=100_000)]
    max: Annotated[int, Field(ge=1, le=100_000)]


Count = Annotated[int, Field(ge=1, le=100_000)]
IntOrRange = Annotated[Count | Range, Field(json_schema_extra=dict(PRESERVE))]


def as_range(value: int | Range) -> Range:
    return value if isinstance(value, Range) else Range(min=value, max=value)


class FlowSpec(Model):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    """A registered flow (ppo, grpo, synthetic) or the user's own module:function."""
    steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = 100
    """Policy updates until the job is complete. 100: enough to see a curve, cheap if forgotten."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 0
    """Policy versions a unit may lag behind the weights it trains. 0: exactly on policy, the safe choice."""
    config: Config = {}
    """The flow's own settings, checked against the flow's schema."""


class ModelSpec(Model):
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder with the base model as transformers saves one, mounted by the pools' templates."""


class DataSpec(Model):
    train: Annotated[str, Field(max_length=4096)] = ""
    """Rows, mounted by the pools' templates: a .jsonl or .parquet file, or a folder of datasets' save_to_disk."""
    eval: Annotated[str, Field(max_length=4096)] = ""
    """Likewise, of rows that nothing is learnt from: flow grpo evaluates on them, as flow.config.evaluation says.
    Empty: nothing is evaluated."""


class RoleSpec(Model):
    name: Name
    kind: Annotated[str, Field(min_length=1, max_length=200)]
    """A registered kind (gymnasium, torch, transformers, vllm, rule, fsdp, synthetic) or the user's own
    module:Class."""
    slots_per_worker: Annotated[int, Field(ge=1, le=64)] = 1
    """Slots of one pod that one worker takes (tensor parallel). 1: one process on one slot."""
    workers: IntOrRange = Range(min=1, max=1)
    """How many workers, or {min, max}: the plan chooses within. Default one."""
    spares: Annotated[int, Field(ge=0, le=16)] = 0
    """Warm spares in each pod that runs the role: processes with their imports done, on no slot, that take the place
    of a lost worker. 0: each takes as much of the pod's memory as its imports do. Read as a driver starts."""
    config: Config = {}
    """The kind's own settings, checked against the kind's schema."""


class SlotsSpec(Model):
    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    f"!has(self.resource) || self.resource == '' || self.resource.matches('{RESOURCE_PATTERN}')",
                    "spec.pools[*].slots.resource is no extended resource; write domain/name, such as nvidia.com/gpu",
                ),
            ]
        }
    )
    per_pod: Annotated[int, Field(ge=1, le=64, json_schema_extra=UNSAID)] = 1
    """Slots of one pod. Default what the runtime says, else 1: the smallest pod that can be scheduled anywhere."""
    resource: Annotated[str, Field(max_length=253)] = ""
    """Extended resource of an accelerator slot, e.g. nvidia.com/gpu. Empty: slots are shares of CPU."""
    cpu: Annotated[str, Field(max_length=24)] = ""
    """CPU of one slot, beside its accelerator where it has one. Empty: beside one none is asked for, else 1 core."""
    memory: Annotated[Quantity, Field(json_schema_extra=UNSAID)] = "2Gi"
    """Memory of one slot, by which plans go: the accelerator's own, or without one the host's, which its pod asks for.
    Default what the runtime says, else 2Gi."""
    host_memory: MaybeQuantity | None = None
    """Memory of the host beside the accelerator of one slot. Absent: none is asked for. Without an accelerator that is
    memory."""


LabelKey = Annotated[str, Field(pattern=LABEL_KEY_PATTERN, max_length=63)]
"""The key of a node's label. 63 characters: Kueue takes no more of a topology's level."""


class TopologySpec(Model):
    """Where the nodes of like pods are, seen from each other, by a label of the nodes: {required: example.com/rack}."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "[has(self.required), has(self.preferred), has(self.spread)].exists_one(said, said)",
                    "spec.placement.topology, or a pool's, has not one of required, preferred and spread; write one, "
                    "such as {required: example.com/rack}",
                ),
            ]
        }
    )
    required: LabelKey | None = None
    """All are on nodes with one value of this label; a pod that finds no room there waits."""
    preferred: LabelKey | None = None
    """The same where there is room; elsewhere otherwise."""
    spread: LabelKey | None = None
    """As even over the values of this label as there is room: a lost rack takes few of them along."""


class PoolSpec(Model):
    name: Name
    roles: Annotated[list[Name], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"})] = []
    """Roles that may run here; the pool's certificate may register only these. Empty: all, in a job of one pool."""
    pods: IntOrRange = 1
    """How many pods, or {min, max}: the plan chooses within. Default one."""
    slots: Annotated[SlotsSpec, Field(json_schema_extra=UNSAID)] = SlotsSpec()
    image: Annotated[str, Field(max_length=1024)] = ""
    """Image of the pool's pods. Empty: that of container agent in the templates, else the operator's default."""
    topology: TopologySpec | None = None
    """The topology of the pool's pods among themselves. Absent: spec.placement.topology holds."""
    template: Template = {}
    """PodTemplateSpec over spec.template, merged under what the operator owns; its container agent is ours."""


class DriverSpec(Model):
    template: Template = {}
    """PodTemplateSpec over spec.template and the operator's defaults for drivers; its container driver is ours."""
    evictable: bool = True
    """False: a PodDisruptionBudget keeps the driver where it is while the job is at work, and a drain of its node waits
    for the job's end. True by default, as a node is to be freed within minutes, and another driver goes on within
    seconds."""


class PlacementMode(StrEnum):
    AUTO = "Auto"
    COLLOCATED = "Collocated"
    DISAGGREGATED = "Disaggregated"
    PINNED = "Pinned"


class PlacementSpec(Model):
    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "self.mode != 'Pinned' || (has(self.pin) && self.pin != '')",
                    "spec.placement.mode is Pinned but spec.placement.pin is empty; write the name of an RLPlan of it",
                ),
                cel(
                    "self.mode == 'Pinned' || !has(self.pin) || self.pin == ''",
                    "spec.placement.pin is set but spec.placement.mode is not Pinned; write mode: Pinned or remove pin",
                ),
            ]
        }
    )
    mode: PlacementMode = PlacementMode.AUTO
    pin: Annotated[str, Field(max_length=63)] = ""
    """Name of the RLPlan that mode Pinned keeps."""
    profile_steps: Annotated[int, Field(ge=0, le=1000)] = 3
    """First steps of each plan that have a profile of their own; later ones share one. 3: one to warm up, two to see
    the spread."""
    apply: Literal["Auto", "OnApproval"] = "Auto"
    """Who approves a new plan: nobody, or the annotation rlinf.io/approved-by on the RLPlan."""
    topology: TopologySpec | None = None
    """The topology of the pods of all pools that have none of their own, seen as one group: roles that exchange data in
    one rack. The driver is none of them. Absent: pods go where templates and scheduler say."""


class Objective(StrEnum):
    STEP_TIME = "StepTime"
    COST_PER_STEP = "CostPerStep"


class CheckpointSpec(Model):
    uri: Annotated[str, Field(max_length=4096)] = ""
    """Folder (absolute path or file://...), s3://bucket/prefix or gs://bucket/prefix. Empty: the operator's default."""
    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    """Steps between checkpoints; what an actor's loss costs at most. 20: minutes for most jobs."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 3
    """Newest checkpoints kept. 3: one may be unreadable, one may be read while one is written."""


_ANY_FAILURE: Final = "r, r.role == '' && r.pool == '' && r.exitCodes.size() == 0 && r.reasons.size() == 0"


class FailureKind(StrEnum):
    """What ends a pod, or keeps it from beginning, beside an exit code of its own."""

    OOM_KILLED = "OOMKilled"
    EVICTED = "Evicted"
    NODE_LOST = "NodeLost"
    IMAGE_PULL = "ImagePull"
    UNSCHEDULABLE = "Unschedulable"
    DEADLINE_EXCEEDED = "DeadlineExceeded"


class FailureAction(StrEnum):
    RESTART_WORKER = "RestartWorker"
    RESTART_POD = "RestartPod"
    RESTART_JOB = "RestartJob"
    FAIL_JOB = "FailJob"
    IGNORE = "Ignore"
    SUSPEND = "Suspend"


class FailureRule(Model):
    """What follows a failure that has all that it names. docs/recovery.md has the table."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "!has(self.maxRestarts) || self.action in ['RestartWorker', 'RestartPod', 'RestartJob']",
                    "spec.failurePolicy.rules[*].maxRestarts is set, but its action counts no restarts; remove it, or "
                    "write RestartWorker, RestartPod or RestartJob",
                ),
                cel(
                    "self.backOffSeconds == 0 || !(self.action in ['FailJob', 'Suspend'])",
                    "spec.failurePolicy.rules[*].backOffSeconds is set, but its action starts nothing again; remove it",
                ),
                cel(
                    "self.action != 'RestartWorker' || self.reasons.all(r, r == 'OOMKilled')",
                    "spec.failurePolicy.rules[*].action is RestartWorker, but one of its reasons is of a whole pod; "
                    "write RestartPod",
                ),
                cel(
                    "self.exitCodes.size() == 0 || self.reasons.all(r, r == 'OOMKilled')",
                    "spec.failurePolicy.rules[*] has exitCodes and a reason that is no exit; write two rules",
                ),
            ]
        }
    )
    name: Annotated[str, Field(max_length=63, pattern=r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$")] = ""
    """How messages and status.restarts call it. Empty: by its place in the list, from 0, and in status.restarts by a
    hash of what it meets, so that edits of the list leave its count alone."""
    role: Annotated[str, Field(max_length=63)] = ""
    """Role it applies to: of the worker that failed, or a role of the pool whose pod did. Empty: any, and drivers."""
    pool: Annotated[str, Field(max_length=63)] = ""
    """Pool of the worker or pod. Empty: any, and drivers."""
    exit_codes: Annotated[
        list[Annotated[int, Field(ge=1, le=255)]],
        Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = []
    """One of these; 128 + N: killed by signal N. Empty: any, and failures without one."""
    reasons: Annotated[list[FailureKind], Field(max_length=6, json_schema_extra={"x-kubernetes-list-type": "set"})] = []
    """One of these. Empty: any failure, but neither ImagePull nor Unschedulable, which wait."""
    action: FailureAction
    """What follows. RestartWorker of a pod that has ended is RestartPod; Ignore restarts and counts nothing."""
    max_restarts: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Restarts by this rule within resetAfterSeconds before the job fails; they count against no other bound. Absent:
    they count against failurePolicy.maxRestarts."""
    back_off_seconds: Annotated[int, Field(ge=0, le=86_400)] = 0
    """Pause before the restart, doubled with each further one, to eight times itself. 0: the usual pauses."""
    after_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    """How long a pod waits before it counts as Unschedulable, from its creation, or ImagePull, from when it has a node.
    300: an autoscaler brings a node sooner."""


class FailurePolicySpec(Model):
    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "self.rules.all(a, a.name == '' || self.rules.exists_one(b, b.name == a.name))",
                    "spec.failurePolicy.rules has a name twice; rename one",
                ),
                cel(
                    f"!self.rules.exists({_ANY_FAILURE}) || (self.rules.exists_one({_ANY_FAILURE})"
                    " && self.rules[self.rules.size() - 1].role == '' && self.rules[self.rules.size() - 1].pool == ''"
                    " && self.rules[self.rules.size() - 1].exitCodes.size() == 0"
                    " && self.rules[self.rules.size() - 1].reasons.size() == 0)",
                    "spec.failurePolicy.rules has a rule behind one that names nothing and so meets every failure; "
                    "move that one to the end",
                ),
            ]
        }
    )
    max_restarts: Annotated[int, Field(ge=0, le=100_000)] = 20
    """Restarts of workers and pods, together, before the job fails."""
    reset_after_seconds: Annotated[int, Field(ge=1, le=31_536_000)] = 3600
    """Restarts older than this are forgotten: a job of weeks may lose a pod a day."""
    rules: Annotated[list[FailureRule], Field(max_length=32)] = []
    """The first one that a failure meets says what follows; without any the rules of docs/recovery.md#bounds do."""


class AllOrNothingSpec(Model):
    timeout_seconds: Annotated[int, Field(ge=1, le=31_536_000)] = 600
    """How long a job may hold nodes for some of its pods while others find none; then it gives all back, waits and
    tries again. 600: an autoscaler brings nodes within that."""


class RLJobSpec(Model):
    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    f"self.roles.size() > 0 || self.flow.name in {list(flows.WITH_ROLES)}",
                    f"spec.roles is empty, which only a job of flow {' or '.join(flows.WITH_ROLES)} may leave so; "
                    "write the roles of your flow",
                ),
                cel(
                    "self.pools.size() == 1 || self.pools.all(p, p.roles.size() > 0)",
                    "spec.pools[*].roles is empty, which only the one pool of a job may leave so; write the roles that "
                    "may run there",
                ),
                cel(
                    f"self.pools.all(p, p.name != '{names.COMPONENT_DRIVER}')",
                    "spec.pools[*].name is driver, which in a queue is the name of the driver's own pod; rename it",
                ),
                cel(
                    "has(self.runtime) || self.pools.all(p, !has(p.slots) || !has(p.slots.hostMemory)"
                    " || p.slots.hostMemory == '' || (has(p.slots.resource) && p.slots.resource != ''))",
                    "spec.pools[*].slots has hostMemory and no resource, but without an accelerator the host's memory "
                    "is memory; write that, or name the resource",
                ),
                cel(
                    f"{roles_in_cel('self')}.all(n, self.pools.exists(p, p.roles.size() == 0 || n in p.roles))",
                    "spec.roles has a role that no pool may run; add its name to spec.pools[*].roles",
                ),
                cel(
                    f"self.pools.all(p, p.roles.all(n, n in {roles_in_cel('self')}))",
                    "spec.pools[*].roles names a role that spec.roles does not have; add the role or remove the name",
                ),
                cel(
                    f"self.failurePolicy.rules.all(f, f.role == '' || f.role in {roles_in_cel('self')})",
                    "spec.failurePolicy.rules[*].role is none of spec.roles; correct it",
                ),
                cel(
                    "self.failurePolicy.rules.all(f, f.pool == '' || self.pools.exists(p, p.name == f.pool &&"
                    " (f.role == '' || p.roles.size() == 0 || f.role in p.roles)))",
                    "spec.failurePolicy.rules[*].pool is none of spec.pools, or does not run the rule's role; "
                    "correct one of them",
                ),
            ]
        }
    )
    runtime: Annotated[str, Field(min_length=1, max_length=253, pattern=RUNTIME_PATTERN)] | None = None
    """Name of the RLRuntime whose templates, images, slots and queue hold where the job says nothing else. A job at
    work keeps what it began with; one that is resumed takes what the RLRuntime says then."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    flow: FlowSpec
    model: ModelSpec | None = None
    data: DataSpec | None = None
    roles: Annotated[list[RoleSpec], Field(max_length=16, json_schema_extra=by("name"))] = []
    """Who does the work, by name. Empty: those of flow ppo, {name: env, kind: gymnasium}, {name: rollout, kind: torch},
    {name: actor, kind: fsdp}, or of flow grpo, rollout of kind transformers, reward: rule, actor: fsdp; one worker
    each. Of any other flow they are written out."""
    pools: Annotated[
        list[PoolSpec],
        Field(
            min_length=1,
            max_length=16,
            json_schema_extra=by("name"),
        ),
    ]
    template: Template = {}
    """PodTemplateSpec of all pods of the job: pull secrets, tolerations, a priority class, a sidecar. What it says of
    container agent holds for pools' pods, of container driver for the driver; more special templates win."""
    driver: DriverSpec = DriverSpec()
    placement: PlacementSpec = PlacementSpec()
    objective: Objective = Objective.STEP_TIME
    min_gain_per_slot: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of step time that one more slot must save; with CostPerStep at least what it costs. 0: any gain counts."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    failure_policy: FailurePolicySpec = FailurePolicySpec()
    all_or_nothing: AllOrNothingSpec | None = None
    """All pods have a node, or the job holds none. Where the cluster schedules PodGroups its scheduler sees to that,
    else the operator, by a deadline. Absent: pods are placed one by one. A job in a queue leaves it to the queue."""
    suspend: bool = False
    managed_by: Annotated[str, Field(max_length=63, pattern=CONTROLLER_PATTERN)] = names.OPERATOR
    """Controller that looks after the job: this operator, or one that runs it elsewhere and writes its status, such as
    kueue.x-k8s.io/multikueue. Fixed once the job exists."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    active_deadline_seconds: Annotated[int, Field(ge=1, le=315_360_000)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_roles(cls, value: Any) -> Any:
        return flows.filled(value)

    def role(self, name: str) -> RoleSpec:
        return next(r for r in self.roles if r.name == name)

    def pool(self, name: str) -> PoolSpec:
        return next(p for p in self.pools if p.name == name)


class Problem(Model):
    """One sentence about one field: `rljob validate` prints these, the operator puts them into Valid=False."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


# --- status: written by the operator alone ----------------------------------------------------------------------------
class StatusModel(Model):
    """What is not there is absent, and no empty text or map."""

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value not in ("", {})}


class PlanStatusRef(StatusModel):
    current: str = ""
    pending: str = ""
    switches: int = 0
    """Plans put in force so far: a driver that begins anew knows an agent's newer word from an older one by it."""
    asked_within: dict[str, int] = Field(default_factory=dict)
    """Pods of each pool that had nodes as another plan was asked for, because others of the plan in force found none:
    {"gpu": 3}. It is asked for once, whatever the answer."""


class PolicyVersionModel(StatusModel):
    branch: int = 0
    number: int = 0


class MetricModel(StatusModel):
    name: str
    value: str


class PoolStatus(StatusModel):
    name: str
    desired: int = 0
    ready: int = 0
    failed: int = 0
    restarts: int = 0
    slots: int = 0


class CheckpointStatus(StatusModel):
    uri: str = ""
    step: int = 0
    time: Time = None


class FirstFailure(StatusModel):
    """Who failed first, and how; also the JSON in a pod's termination message."""

    role: str = ""
    worker: int = -1
    pod: str = ""
    node: str = ""
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class SuspendedBy(StatusModel):
    """The rule of failurePolicy that has suspended the job; any edit of the spec ends that."""

    generation: int
    """The generation of the RLJob as it was then."""
    rule: str
    message: str


class PlacementStatus(StatusModel):
    """What is known of a job of spec.allOrNothing whose pods do not all have a node."""

    half_placed_since: Time = None
    """Since when it has held some and lacked others; absent: it holds none."""
    tries: int = 0
    """How often in a row it gave its pods back."""
    next_try: Time = None
    """No pod is made before."""


class RuntimeStatus(StatusModel):
    """The RLRuntime that the job's pods are made with, as it was when they began."""

    name: str
    generation: int = 0
    spec: Config = {}


Conditions = Annotated[
    list[Condition],
    Field(json_schema_extra=by("type")),
]


class RLJobStatus(StatusModel):
    state: str = ""
    """How the job is, in one word (conditions.JobState); programs read the conditions."""
    observed_generation: int = 0
    attempt: int = 0
    """Highest pod attempt given out so far in this job."""
    life: int = 1
    """Life of the job: grows when it is resumed or restarted as a whole."""
    worked_life: int = 0
    """The newest life that has made steps, which a change of all pods would lose. 0: none has."""
    start_time: Time = None
    completion_time: Time = None
    plan: PlanStatusRef = PlanStatusRef()
    step: int = 0
    policy_version: PolicyVersionModel = PolicyVersionModel()
    progress_percentage: int = 0
    estimated_remaining_seconds: int | None = None
    metrics: Annotated[
        list[MetricModel],
        Field(json_schema_extra=by("name")),
    ] = []
    pools: Annotated[
        list[PoolStatus],
        Field(json_schema_extra=by("name")),
    ] = []
    restarts: Annotated[list[str], Field(max_length=1000)] = []
    """Replaced pods within failurePolicy.resetAfterSeconds, oldest first: "TIME POD CAUSE[:RULE]". Cause Program counts
    against maxRestarts; naming the pod makes counting it twice impossible. life/N in the place of a pod: a rule has
    restarted the whole job as its life N."""
    checkpoint: CheckpointStatus | None = None
    first_failure: FirstFailure | None = None
    suspended_by: SuspendedBy | None = None
    placement: PlacementStatus | None = None
    runtime: RuntimeStatus | None = None
    conditions: Conditions = []


def dump(model: Model) -> dict[str, Any]:
    """camelCase dict as it stands in a manifest, without fields that are None."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)
