"""validate(): one sentence per problem that says what, where, and what to write instead."""

import copy

import pytest
import yaml

from rlinf_api import flows, supported
from tests.builders import make_job, ppo_job


def sentences(change):
    manifest = ppo_job().build()
    change(manifest)
    return [str(p) for p in supported.validate(manifest)[1]]


def spec(**fields):
    return lambda m: m["spec"].update(fields)


def test_a_good_manifest_has_no_problem():
    found, problems = supported.validate(ppo_job().build())
    assert problems == []
    assert found is not None
    assert found.flow.steps == 100


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (spec(flow={"name": "ppo", "setps": 3}), "spec.flow.setps: is not a field; did you mean 'steps'?"),
        (spec(floww={}), "spec.floww: is not a field; did you mean 'flow'?"),
        (spec(zzz=1), "spec.zzz: is not a field; remove it. Known here: activeDeadlineSeconds,"),
        (spec(flow={"name": "ppo", "steps": "3"}), "spec.flow.steps: got '3', wanted a whole number"),
        (spec(flow={"name": "ppo", "steps": 0}), "spec.flow.steps: got 0, wanted at least 1"),
        (spec(flow={"name": "ppo", "steps": 1.5}), "spec.flow.steps: got 1.5, wanted a whole number"),
        (spec(flow=None), "spec.flow: got nothing (null), wanted a mapping"),
        (lambda m: m["spec"].pop("flow"), "spec.flow: is missing; write it"),
        (spec(suspend="yes"), "spec.suspend: got 'yes', wanted true or false"),
        (
            spec(objective="steptime"),
            "spec.objective: got 'steptime', wanted 'StepTime' or 'CostPerStep'; did you mean",
        ),
        (
            lambda m: m["spec"]["pools"][0].update(pods="many"),
            "spec.pools[sim].pods: got 'many', wanted a whole number from 1 to 100000 or {min: a, max: b}; write",
        ),
        *(
            (
                lambda m, count=count: m["spec"]["pools"][0].update(pods=count),
                f"spec.pools[sim].pods: got {count}, wanted a whole number from 1 to 100000 or {{min: a, max: b}};",
            )
            for count in (0, -3, 100_001, 10**30, 1.5)
        ),
        (
            lambda m: m["spec"]["roles"][0].update(workers=0),
            "spec.roles[env].workers: got 0, wanted a whole number from 1 to 100000 or {min: a, max: b};",
        ),
        (
            lambda m: m["spec"]["pools"][0].update(pods={"min": 0, "max": 0}),
            "spec.pools[sim].pods.max: got 0, wanted at least 1; change it",
        ),
        (
            lambda m: m["spec"]["pools"][0].update(pods={"min": 3, "max": 1}),
            "spec.pools[sim].pods: min 3 is above max 1",
        ),
        (lambda m: m["spec"]["pools"][0].update(pods={"min": 1, "mx": 2}), "spec.pools[sim].pods.mx: is not a field"),
        (lambda m: m["spec"]["pools"][0]["slots"].update(cpu=1), 'got 1, wanted text; write it in quotes: "1"'),
        (
            lambda m: m["spec"]["pools"][0]["slots"].update(cpu="one"),
            "spec.pools[sim].slots.cpu: got 'one', wanted a quant",
        ),
        (lambda m: m["spec"]["pools"][0]["slots"].update(memory="2 GB"), "spec.pools[sim].slots.memory: got '2 GB'"),
        (lambda m: m["spec"]["pools"][0]["slots"].update(perPod=65), "got 65, wanted at most 64"),
        (lambda m: m["spec"]["pools"][0].update(roles=[]), "spec.pools[sim].roles: got []; write the roles that may"),
        (
            lambda m: m["spec"]["pools"][0].update(template={"sepc": {}}),
            "template.sepc: is not a field of a pod template",
        ),
        (
            lambda m: m["spec"]["pools"][0].update(template={"spec": {"containers": [{}]}}),
            "template.spec.containers: wanted",
        ),
        (
            lambda m: m["spec"]["pools"][1].update(roles=["actor"]),
            "spec.roles[rollout]: no pool may run role 'rollout'",
        ),
        (
            lambda m: m["spec"]["pools"][1].update(roles=["actor", "rolout"]),
            "names role 'rolout', which spec.roles does not",
        ),
        (
            lambda m: m["spec"]["roles"][2].update(slotsPerWorker=3),
            "spec.roles[actor].slotsPerWorker: a worker takes 3 slots",
        ),
        (
            lambda m: m["spec"]["roles"][0].update(workers=9),
            "spec.roles[env].workers: needs at least 9 workers of 1 slots",
        ),
        (
            lambda m: m["spec"]["roles"].append(m["spec"]["roles"][0]),
            "spec.roles: name 'env' is used twice; rename one",
        ),
        (
            lambda m: m["spec"]["pools"][0].update(name="driver"),
            "spec.pools[driver].name: got 'driver', which in a queue is the name of the driver's own pod; rename it",
        ),
        (
            lambda m: m["spec"]["pools"][0].update(roles=["env", "env"]),
            "spec.pools[sim].roles: names role 'env' twice; remove one",
        ),
        *(
            (
                lambda m, resource=resource: m["spec"]["pools"][0]["slots"].update(resource=resource),
                f"spec.pools[sim].slots.resource: got {resource!r}, wanted an extended resource; write "
                "domain/name, such as nvidia.com/gpu",
            )
            for resource in ("foo bar", "gpu", "nvidia.com/", "Nvidia.com/gpu", "nvidia.com/gpu ", "a/b/c", "é.com/gpu")
        ),
        (
            spec(checkpoint={"uri": "/a\0b"}),
            "spec.checkpoint.uri: got '/a\\x00b', which has a character that no path has; remove it",
        ),
        (lambda m: m["metadata"].update(name=12), 'metadata.name: got 12, wanted text; write it in quotes: "12"'),
        (lambda m: m["metadata"].update(name=["a"]), "metadata.name: got a list, wanted text; write a name"),
        (lambda m: m["metadata"].update(name=""), "metadata.name: is missing; write a name"),
        (lambda m: m["metadata"].update(name="Bad_Name"), "metadata.name: got 'Bad_Name', wanted at most 40"),
        (lambda m: m["metadata"].update(name="a" * 41), "metadata.name: got"),
        (lambda m: m["metadata"].update(name="math\n"), "metadata.name: got 'math\\n', wanted at most 40"),
        (lambda m: m["metadata"].update(labels=5), "metadata.labels: got 5, wanted a mapping; write one or remove it"),
        (
            lambda m: m["metadata"].update(labels={"a": 1}),
            'metadata.labels.a: got 1, wanted text; write it in quotes: "1"',
        ),
        (
            lambda m: m["metadata"].update(annotations={"a": {"b": "c"}}),
            "metadata.annotations.a: got a mapping, wanted text; write that",
        ),
        (
            lambda m: m["metadata"].update(finalizers="x"),
            "metadata.finalizers: got text, wanted a list; write one or remove it",
        ),
        (
            lambda m: m["metadata"].update(finalizers=["x", 2]),
            "metadata.finalizers[1]: got 2, wanted text; write it in",
        ),
        (
            lambda m: m["metadata"].update(namespace="a b"),
            "metadata.namespace: got 'a b', wanted at most 63 of a-z 0-9",
        ),
        (lambda m: m["metadata"].update(namespace=7), "metadata.namespace: got 7, wanted text; write it in quotes"),
        (lambda m: m.update(metadata=["math"]), "metadata: got a list, wanted a mapping; write name: below it"),
        (lambda m: m.update(kind="Job"), "kind: got 'Job', wanted 'RLJob'"),
        (lambda m: m.update(apiVersion="v1"), "apiVersion: got 'v1', wanted 'rlinf.io/v1alpha1'"),
        (lambda m: m.update(sepc={}), "sepc: is not a field of an RLJob; did you mean 'spec'?"),
        (lambda m: m.pop("spec"), "spec: is missing; write it"),
    ],
)
def test_a_problem_names_field_value_and_remedy(change, sentence):
    found = sentences(change)
    assert any(sentence in s for s in found), found


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (spec(checkpoint={"uri": "az://b/p"}), "spec.checkpoint.uri: scheme 'az://' is not supported yet"),
        (spec(model={"path": "/m"}), "spec.model: flow 'ppo' has no language model and reads no data; remove it"),
        (spec(data={"train": "/d"}), "spec.data.train: flow 'ppo' has no language model and reads no data; remove it"),
        (spec(data={"eval": "/d"}), "spec.data.eval: flow 'ppo' has no language model and reads no data; remove it"),
        (spec(flow={"name": "ppo", "maxStaleness": 1}), "spec.flow.maxStaleness: 1 is not supported yet"),
        (
            spec(flow={"name": "grpo"}),
            "spec.roles[rollout].kind: 'torch' is of flow 'ppo', not 'grpo'; write transformers, vllm",
        ),
        (
            lambda m: m["spec"]["roles"][1].update(kind="transformers"),
            "spec.roles[rollout].kind: 'transformers' is of flow 'grpo', not 'ppo'; write torch, or module:Class",
        ),
        (spec(flow={"name": "pppo"}), "spec.flow.name: 'pppo' is not a registered flow; did you mean 'ppo'?"),
        (
            lambda m: m["spec"]["roles"][1].update(kind="vllm"),
            "spec.roles[rollout].kind: 'vllm' is of flow 'grpo', not 'ppo'; write torch, or module:Class",
        ),
        (
            lambda m: m["spec"]["roles"][0].update(kind="gymnasiun"),
            "is not a registered kind; did you mean 'gymnasium'?",
        ),
        (lambda m: m["spec"]["roles"][0].update(kind="torch"), "'torch' plays 'rollout', not 'env'; write gymnasium"),
    ],
)
def test_a_value_whose_feature_does_not_exist_is_answered_by_name(change, sentence):
    manifest = ppo_job().build()
    change(manifest)
    found = supported.examine(manifest)
    assert found.wrong == ()
    assert any(sentence in str(p) for p in found.later), found.later


@pytest.mark.parametrize("timeout_s", [0, -5])
def test_no_deadline_of_all_or_nothing_is_over_at_once(timeout_s):
    found = sentences(spec(allOrNothing={"timeoutSeconds": timeout_s}))
    assert found == [f"spec.allOrNothing.timeoutSeconds: got {timeout_s}, wanted at least 1; change it"]


@pytest.mark.parametrize("name", ["mine.flows:train\n", "é:\n", "a:b:c", "a:b c"])
def test_what_is_nearly_an_own_flow_or_kind_is_not_let_through(name):
    found = sentences(lambda m: m["spec"]["flow"].update(name=name))
    assert any(s.startswith(f"spec.flow.name: {name!r} is not a registered flow;") for s in found), found
    found = sentences(lambda m: m["spec"]["roles"][0].update(kind=name))
    assert any(s.startswith(f"spec.roles[env].kind: {name!r} is not a registered kind;") for s in found), found


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m["spec"]["flow"].update(config={"env": "a\ud800"}), "spec.flow.config.env"),
        (lambda m: m["spec"]["pools"][1].update(name="\udfff"), "spec.pools[1].name"),
        (lambda m: m["spec"]["pools"][0].update(template={"a\ud800": 1}), "spec.pools[0].template.a\\ud800"),
    ],
)
def test_half_a_character_is_told_with_its_field(change, field):
    (said,) = sentences(change)
    assert said == f"{field}: has half a character (a surrogate), which no JSON has; write the character itself"


def test_a_character_outside_the_first_plane_is_let_through():
    assert (
        sentences(lambda m: m["spec"]["pools"][0].update(template={"metadata": {"labels": {"a": "\U0001f600"}}})) == []
    )


def test_what_the_api_server_adds_to_the_metadata_is_let_through():
    def change(manifest):
        manifest["metadata"].update(
            labels=None, annotations={"a": "b"}, finalizers=["x/y"], namespace="team-1", managedFields=[{}],
            ownerReferences=[{"uid": "u"}], creationTimestamp=None,
        )  # fmt: skip

    assert sentences(change) == []


def test_a_role_that_the_flow_does_not_know_and_one_that_it_misses():
    manifest = ppo_job().build()
    manifest["spec"]["roles"][0]["name"] = "sim"
    manifest["spec"]["pools"][0]["roles"] = ["sim"]
    found = [str(p) for p in supported.validate(manifest)[1]]
    assert any("flow 'ppo' uses role 'env', got sim, rollout, actor; add a role named 'env'" in s for s in found)
    assert any("spec.roles[sim]: flow 'ppo' has no role 'sim'" in s for s in found)


OF_PPO = "[{name: env, kind: gymnasium}, {name: rollout, kind: torch}, {name: actor, kind: fsdp}]"


def smallest(flow="ppo"):
    """What a person writes first: a flow, its environment, a pool."""
    manifest = make_job(flow).pool("sim", []).build()
    manifest["spec"].pop("roles")
    manifest["spec"]["pools"][0].pop("roles")
    return manifest


def test_a_job_of_a_registered_flow_needs_no_roles_and_its_one_pool_runs_them_all():
    spec, problems = supported.validate(smallest())
    assert problems == []
    assert spec is not None
    assert [(role.name, role.kind) for role in spec.roles] == [
        ("env", "gymnasium"), ("rollout", "torch"), ("actor", "fsdp"),
    ]  # fmt: skip
    assert [pool.roles for pool in spec.pools] == [["env", "rollout", "actor"]]
    written = smallest()
    written["spec"]["roles"] = yaml.safe_load(OF_PPO)
    written["spec"]["pools"][0]["roles"] = ["env", "rollout", "actor"]
    assert supported.validate(written)[0] == spec


def test_flow_grpo_takes_turns():
    manifest = smallest("grpo")
    manifest["spec"]["placement"] = {"mode": "Collocated"}
    spec, _ = supported.validate(manifest)
    assert spec is not None
    assert spec.placement.mode.value == "Collocated"


def test_flow_grpo_has_roles_of_its_own_kinds():
    spec, _ = supported.validate(smallest("grpo"))
    assert spec is not None
    assert {role.name: role.kind for role in spec.roles} == {
        "rollout": "transformers", "reward": "rule", "actor": "fsdp",
    }  # fmt: skip


def test_an_empty_list_is_what_an_api_server_makes_of_none():
    manifest = smallest()
    manifest["spec"]["roles"] = manifest["spec"]["pools"][0]["roles"] = []
    assert supported.validate(manifest) == supported.validate(smallest())


def test_null_is_no_default():
    manifest = smallest()
    manifest["spec"]["roles"] = None
    said = [str(p) for p in supported.validate(manifest)[1]]
    assert f"spec.roles: got nothing (null); write those of flow 'ppo': {OF_PPO}" in said


def test_with_several_pools_each_lists_its_own_as_its_certificate_lets_only_those_in():
    manifest = smallest()
    manifest["spec"]["pools"].append({"name": "train", "roles": []})
    assert [str(p) for p in supported.validate(manifest)[1]] == [
        "spec.pools[sim].roles: is missing; write the roles that may run there, for all: [env, rollout, actor]",
        "spec.pools[train].roles: got []; write the roles that may run there, for all: [env, rollout, actor]",
    ]
    for pool in manifest["spec"]["pools"]:
        pool["roles"] = ["env", "rollout", "actor"]
    assert supported.validate(manifest)[1] == []


def test_the_one_pool_of_a_job_runs_the_roles_that_are_written():
    manifest = make_job("m:f").role("judge", "m:Judge").role("env", "gymnasium").pool("cpu", []).build()
    spec, problems = supported.validate(manifest)
    assert problems == []
    assert spec is not None
    assert spec.pools[0].roles == ["judge", "env"]


def test_a_flow_of_ones_own_writes_its_roles_and_is_given_a_form():
    assert [str(p) for p in supported.validate(smallest("m:f"))[1]] == [
        "spec.roles: is missing; write those of your flow, such as [{name: env, kind: gymnasium}]",
        "spec.pools[sim].roles: is missing; write the roles that may run there, such as [env]",
    ]
    (said, _) = [str(p) for p in supported.validate(smallest("synthetic"))[1]]
    assert said == "spec.roles: is missing; write those of your flow, such as [{name: env, kind: synthetic}]"


def test_of_a_flow_that_is_not_registered_missing_roles_are_told():
    manifest = smallest("x")
    assert any(str(p).startswith("spec.roles: is missing; write") for p in supported.validate(manifest)[1])


@pytest.mark.parametrize("flow", [None, 3, {}, []])
def test_a_flow_that_has_no_name_is_told_by_itself(flow):
    manifest = smallest()
    manifest["spec"]["flow"] = {"name": flow}
    assert [p.field for p in supported.validate(manifest)[1]] == ["spec.flow.name"]


def test_the_users_own_flow_and_kinds_are_let_through():
    job = make_job("mine.flows:train").role("judge", "mine.roles:Judge").pool("cpu", ["judge"])
    assert supported.validate(job.build())[1] == []


@pytest.mark.parametrize("resource", ["", "nvidia.com/gpu", "amd.com/gpu-7900_xt", "example.com/Accelerator.v2", "a/b"])
def test_an_extended_resource_is_let_through(resource):
    assert sentences(lambda m: m["spec"]["pools"][0]["slots"].update(resource=resource)) == []


def test_file_uris_and_paths_are_supported():
    for uri in ("/data/c", "file:///data/c", ""):
        assert sentences(spec(checkpoint={"uri": uri})) == []


def test_every_problem_is_told_at_once_and_each_field_once():
    def change(manifest):
        manifest["spec"]["flow"]["setps"] = 1
        manifest["spec"]["suspend"] = 3
        manifest["spec"]["roles"][0]["workers"] = [1]

    found = sentences(change)
    assert len(found) == 3
    assert len({s.split(":")[0] for s in found}) == 3


@pytest.mark.parametrize("value", [None, 3, "text", []])
def test_what_is_no_mapping_is_no_manifest(value):
    found, problems = supported.validate(value)
    assert found is None
    assert len(problems) == 1


SECRET = "hunter2-secret"
ENV = {"env": [{"name": "WANDB_API_KEY", "value": SECRET}]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda m: m["spec"]["pools"][0].update(template={"spec": [{"containers": [ENV]}]}),
            "spec.pools[sim].template.spec: got a list, wanted a mapping; write one or remove it",
        ),
        (
            lambda m: m["spec"]["pools"][0].update(template={"spec": f"{ENV}"}),
            "spec.pools[sim].template.spec: got text, wanted a mapping",
        ),
        (
            lambda m: m["spec"]["pools"][0].update(template=[ENV]),
            "spec.pools[sim].template: got a list, wanted a mapping",
        ),
        (
            lambda m: m["spec"]["pools"][0].update(template=f"{ENV}"),
            "spec.pools[sim].template: got text, wanted a mapping",
        ),
        (lambda m: m["spec"]["pools"][0].update(slots=ENV["env"]), "spec.pools[sim].slots: got a list, wanted"),
        (lambda m: m["spec"]["pools"][0].update(pods=ENV), "spec.pools[sim].pods.env: is not a field"),
        (lambda m: m["spec"]["pools"][0].update(name=ENV), "spec.pools[0].name: got a mapping, wanted text"),
        (lambda m: m["spec"].update(pools={"sim": {"template": ENV}}), "spec.pools: got a mapping, wanted a list"),
        (lambda m: m["spec"].update(pools=f"{ENV}"), "spec.pools: got text, wanted a list"),
        (lambda m: m["spec"].update(pools=[f"{ENV}"]), "spec.pools[0]: got text, wanted a mapping"),
        (lambda m: m.update(spec=[ENV]), "spec: got a list, wanted a mapping"),
        (lambda m: m.update(spec=f"{ENV}"), "spec: got text, wanted a mapping"),
        (lambda m: m.update(kind=ENV), "kind: got a mapping, wanted 'RLJob'"),
    ],
)
def test_a_sentence_names_the_kind_of_what_may_hold_a_secret_and_not_its_value(change, sentence):
    manifest = ppo_job().build()
    change(manifest)
    found = [str(problem) for problem in supported.validate(manifest)[1]]
    assert any(s.startswith(sentence) for s in found), found
    assert not any(SECRET in s for s in found), found


def test_a_template_of_any_length_gets_a_short_sentence():
    found = sentences(lambda m: m["spec"]["pools"][0].update(template={"spec": ["x" * 40_000]}))
    assert sum(map(len, found)) < 200


def test_validating_changes_nothing():
    manifest = ppo_job().build()
    before = copy.deepcopy(manifest)
    supported.validate(manifest)
    assert manifest == before


def test_what_is_registered_here_is_what_the_worker_registers():
    from rlinf_worker.flows import registry

    assert set(flows.FLOWS) == set(registry.FLOWS)
