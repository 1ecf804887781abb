"""A job at its bounds: what is just allowed is answered by nothing, what is just beyond by one whole sentence."""

from pathlib import Path
from typing import Any

import pytest

from rlinf_api import job_rules, storable, supported
from rlinf_api.job import RLJobSpec, RLJobStatus, dump
from rlinf_api.plan import RLPlanSpec, RLPlanStatus
from tests.builders import ppo_job
from tools import gen_crds

ROOT = Path(__file__).parents[3]
MODELS = (RLJobSpec, RLJobStatus, RLPlanSpec, RLPlanStatus)


@pytest.mark.parametrize("name", ["rlinf.io_rljobs.yaml", "rlinf.io_rlplans.yaml"])
def test_an_api_server_holds_the_bounds_and_writes_the_defaults_that_the_models_have(name):
    assert gen_crds.documents()[name].splitlines() == (ROOT / "crds" / name).read_text(encoding="utf-8").splitlines()


def said(change: Any) -> list[str]:
    manifest = ppo_job().build()
    change(manifest)
    return [str(problem) for problem in supported.examine(manifest).wrong]


def role(number: int, **fields: Any) -> Any:
    return lambda m: m["spec"]["roles"][number].update(fields)


def pool(**fields: Any) -> Any:
    return lambda m: m["spec"]["pools"][0].update(fields)


def slots(**fields: Any) -> Any:
    return lambda m: m["spec"]["pools"][0]["slots"].update(fields)


def metadata(**fields: Any) -> Any:
    return lambda m: m["metadata"].update(fields)


def spec(**fields: Any) -> Any:
    return lambda m: m["spec"].update(fields)


def each(*changes: Any) -> Any:
    return lambda m: [change(m) for change in changes]


SHAPE = "wanted a list of entries that each have a name; write name: agent"
QUANTITY = "wanted a quantity of at least"


@pytest.mark.parametrize(
    "change",
    [
        pool(template={"spec": {"containers": [{"name": "agent"}], "volumes": []}, "metadata": {}}),
        pool(pods={"min": 2, "max": 2}),
        slots(cpu="1m"),
        slots(memory="1"),
        slots(resource="nvidia.com/gpu"),
        slots(resource="nvidia.com/gpu", cpu="6", memory="80Gi", hostMemory="48Gi"),
        slots(hostMemory=""),
        metadata(name="a"),
        metadata(name="a" * 40, namespace="1" * 63),
        metadata(namespace=""),
        lambda m: m.pop("status", None),
        lambda m: m.update(status={}),
        each(spec(placement={"mode": "Pinned", "pin": "plan-3"})),
        *(spec(checkpoint={"uri": uri}) for uri in ("file://localhost/a", "/a#b", "/a?b", "file:///a%20b", "")),
    ],
)
def test_what_is_just_allowed_is_answered_by_nothing(change):
    assert said(change) == []


def test_what_slots_do_not_say_is_in_no_key_of_a_profile():
    """Else an upgrade that knows one field more would forget what was measured."""
    assert dump(ppo_job().parsed().pools[0].slots) == {"perPod": 4, "resource": "", "cpu": "", "memory": "2Gi"}


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (
            spec(placement={"mode": "Pinned"}),
            ["spec.placement.pin: mode is Pinned but pin is empty; write the name of an RLPlan of this job"],
        ),
        (
            spec(placement={"mode": "Auto", "pin": "a"}),
            ["spec.placement.pin: got 'a', but mode is Auto, which looks at no pin; write mode: Pinned or remove pin"],
        ),
        (pool(pods={"min": 3, "max": 2}), ["spec.pools[sim].pods: min 3 is above max 2; swap them"]),
        (role(0, workers={"min": 3, "max": 2}), ["spec.roles[env].workers: min 3 is above max 2; swap them"]),
        (
            each(pool(roles=["env", "judge"])),
            [
                "spec.pools[sim].roles: names role 'judge', which spec.roles does not have (env, rollout, actor); "
                "add the role or remove the name"
            ],
        ),
        (
            slots(hostMemory="8Gi"),
            [
                "spec.pools[sim].slots.hostMemory: got '8Gi', but without an accelerator the host's memory is memory; "
                "write that, or name the resource"
            ],
        ),
        (
            pool(template={"kind": "Pod", "spec": {"containers": [{"image": "x"}], "volumes": {}}}),
            [
                "spec.pools[sim].template.kind: is not a field of a pod template; write metadata or spec",
                f"spec.pools[sim].template.spec.containers: {SHAPE}",
                f"spec.pools[sim].template.spec.volumes: {SHAPE}",
            ],
        ),
        (
            pool(template={"spec": {"initContainers": ["x"]}}),
            [f"spec.pools[sim].template.spec.initContainers: {SHAPE}"],
        ),
        (metadata(namespace="n" * 64), [f"metadata.namespace: got '{'n' * 64}'"]),
        (metadata(namespace="-a"), ["metadata.namespace: got '-a', wanted at most 63 of a-z 0-9 '-'; change it"]),
        (metadata(name=None), ["metadata.name: is missing; write a name"]),
        (metadata(name=True), ['metadata.name: got true, wanted text; write it in quotes: "true"']),
        (lambda m: m.pop("metadata"), ["metadata.name: is missing; write a name"]),
        (lambda m: m.update({"": 1}), ["'': is not a field of an RLJob; remove it"]),
        (
            spec(checkpoint={"uri": "data/c"}),
            ["spec.checkpoint.uri: got 'data/c', wanted an absolute path; write file:///path or /path"],
        ),
        (
            spec(checkpoint={"uri": "file://host/c"}),
            ["spec.checkpoint.uri: got 'file://host/c', wanted an absolute path; write file:///path or /path"],
        ),
        (
            spec(checkpoint={"uri": "file:///a#b"}),
            [
                "spec.checkpoint.uri: got 'file:///a#b', which as a uri ends at its '#'; write '#' as %23, "
                "or the path alone"
            ],
        ),
        (
            spec(checkpoint={"uri": "file:///a%0ab"}),
            ["spec.checkpoint.uri: got 'file:///a%0ab', which has a character that no path has; remove it"],
        ),
        (
            spec(checkpoint={"uri": "/a\x1fb"}),
            ["spec.checkpoint.uri: got '/a\\x1fb', which has a character that no path has; remove it"],
        ),
    ],
)
def test_what_is_just_beyond_is_answered_by_its_sentences_alone(change, sentences):
    found = said(change)
    assert len(found) == len(sentences)
    for sentence, expected in zip(found, sentences, strict=True):
        assert sentence.startswith(expected)


@pytest.mark.parametrize("uri", ["s3://ckpt", "s3://ckpt/", "gs://my_team.ckpt/jobs/ppo-1", "s3://ckpt/a=1/b+c/..d"])
def test_a_prefix_of_a_bucket_is_a_place(uri):
    assert list(job_rules.check_uri("uri", uri)) == []
    assert said(spec(checkpoint={"uri": uri})) == []


@pytest.mark.parametrize(
    "uri",
    ["s3://", "s3://b", "s3:///x", "s3://Bucket/x", "s3://ckpt//x", "s3://ckpt/a b", "gs://ckpt/../x", "s3://ckpt/x?y"],
)
def test_what_a_store_would_take_for_another_place_is_refused(uri):
    [found] = said(spec(checkpoint={"uri": uri}))
    assert found.startswith(f"spec.checkpoint.uri: got {uri!r}, wanted a bucket and a prefix of letters, digits and")


def test_a_key_in_a_uri_is_refused_and_not_repeated():
    [found] = said(spec(checkpoint={"uri": "s3://id:secret@ckpt/x"}))
    assert found.startswith("spec.checkpoint.uri: has an '@', before which credentials might stand; write s3://bucket/")
    assert "secret@" not in found


@pytest.mark.parametrize("uri", ["s3://ckpt/a\x01b", "s3://id:secret\x01@ckpt/x"])
def test_of_a_place_in_a_store_one_thing_is_said_and_nothing_of_paths(uri):
    [found] = said(spec(checkpoint={"uri": uri}))
    assert "s3://bucket/prefix" in found


def test_a_space_is_a_character_that_a_path_may_have():
    assert list(job_rules.check_uri("uri", "/a b")) == []


# --- what fits --------------------------------------------------------------------------------------------------------
def sized(*, workers: Any, spares: int = 0, max_restarts: int = 20, pods: int = 2, per_pod: int = 5) -> Any:
    """Of role env, whose workers take 2 slots, in one pool: per pod as many as 2 go into `per_pod`."""

    def change(manifest: Any) -> None:
        manifest["spec"]["failurePolicy"] = {"maxRestarts": max_restarts}
        manifest["spec"]["roles"][0].update(slotsPerWorker=2, workers=workers, spares=spares)
        for one in manifest["spec"]["pools"]:
            one["roles"] = [name for name in one["roles"] if name != "env"]
        more = {"name": "own", "roles": ["env"], "pods": pods, "slots": {"perPod": per_pod}}
        manifest["spec"]["pools"] = [more, *(one for one in manifest["spec"]["pools"] if one["roles"])]

    return change


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (sized(workers=4), []),
        (
            sized(workers=5),
            [
                "spec.roles[env].workers: needs at least 5 workers of 2 slots, but its pools hold 4; "
                "lower workers or raise spec.pools[own].pods"
            ],
        ),
        (sized(workers={"min": 4, "max": 9}), []),
        (sized(workers=1, per_pod=2), []),
        (
            sized(workers=1, per_pod=1),
            [
                "spec.roles[env].slotsPerWorker: a worker takes 2 slots of one pod, but the widest pool 'own' has 1 "
                "per pod; lower slotsPerWorker or raise spec.pools[own].slots.perPod"
            ],
        ),
        (sized(workers=4, spares=2), []),
        (
            sized(workers=4, spares=3),
            [
                "spec.roles[env].spares: got 3, but a pod runs at most 2 workers of this role, and a spare takes the "
                "place of one in its own pod; write 2 or less"
            ],
        ),
        (
            sized(workers=1, spares=2),
            [
                "spec.roles[env].spares: got 2, but a pod runs at most 1 workers of this role, and a spare takes the "
                "place of one in its own pod; write 1 or less"
            ],
        ),
        (sized(workers=4, spares=1, max_restarts=1), []),
        (
            sized(workers=4, spares=1, max_restarts=0),
            [
                "spec.roles[env].spares: got 1, but spec.failurePolicy.maxRestarts is 0, so the first lost worker "
                "fails the job; raise maxRestarts or remove spares"
            ],
        ),
        (sized(workers=4, max_restarts=0), []),
    ],
)
def test_workers_and_spares_fit_into_their_pools(change, sentences):
    assert said(change) == sentences


def test_a_role_that_no_pool_may_run_is_named_with_the_pools():
    manifest = ppo_job().build()
    for one in manifest["spec"]["pools"]:
        one["roles"] = [name for name in one["roles"] if name != "env"] or ["actor"]
    pools = ", ".join(one["name"] for one in manifest["spec"]["pools"])
    found = [str(problem) for problem in supported.examine(manifest).wrong]
    assert found == [f"spec.roles[env]: no pool may run role 'env'; add it to spec.pools[*].roles of one of {pools}"]


@pytest.mark.parametrize(
    ("field", "text", "per_pod", "is_right"),
    [
        ("cpu", "1m", 1, True), ("cpu", "0.5m", 1, False), ("cpu", "0", 1, False),
        ("cpu", "9223372036854775", 1, True), ("cpu", "9223372036854776", 1, False),
        ("cpu", "9223372036854775", 2, False), ("cpu", "4611686018427387", 2, True),
        ("memory", "1", 1, True), ("memory", "0", 1, False), ("memory", "9223372036854775807", 1, True),
        ("memory", "9223372036854775807", 2, False),
    ],
)  # fmt: skip
def test_all_slots_of_a_pod_together_are_a_quantity_that_kubernetes_counts(field, text, per_pod, is_right):
    manifest = ppo_job().build()
    one = manifest["spec"]["pools"][0]
    one["slots"] = {"perPod": per_pod, field: text}
    parsed = RLJobSpec.model_validate(manifest["spec"])
    found = [problem for problem in job_rules.check(parsed) if problem.field.endswith(field)]
    assert (found == []) is is_right
    if found:
        count = "the 1 slot" if per_pod == 1 else f"the {per_pod} slots"
        example = "2Gi" if field == "memory" else "1 or 500m"
        assert f"for {count} of a pod; write for example {example}" in found[0].message


# --- what JSON has ----------------------------------------------------------------------------------------------------
def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_a_manifest_may_have_a_hundred_levels():
    assert storable.problems(nested(storable.MAX_DEPTH), "spec") == []
    (problem,) = storable.problems(nested(storable.MAX_DEPTH + 1), "spec")
    assert str(problem) == f"spec{'[0]' * 100}: has more than 100 levels; write it out without the alias, or flatter"


def test_what_holds_itself_is_named():
    ring: dict[str, Any] = {}
    ring["a"] = {"b": ring}
    (problem,) = storable.problems(ring, "spec")
    assert str(problem) == "spec.a.b: holds itself; write it out without the alias, or flatter"
    twice = {"x": 1}
    assert storable.problems([twice, twice], "spec") == [], "two aliases are no circle"


@pytest.mark.parametrize(
    ("value", "size"),
    [("abc", 5), (7, 8), (["abc"], 7), ({"ab": "abc"}, 13), ([[], 1], 12), ([1, 2], 18), ({"a": {}, "b": 1}, 22)],
)
def test_the_size_of_a_manifest_is_counted_with_its_aliases_written_out(monkeypatch, value, size):
    monkeypatch.setattr(storable, "MAX_SIZE", size)
    assert storable.problems(value, "spec") == []
    monkeypatch.setattr(storable, "MAX_SIZE", size - 1)
    found = [str(problem) for problem in storable.problems(value, "spec")]
    assert found == [
        f"spec: is larger than {size - 1} characters with its aliases written out; an API server takes no more, "
        "make it smaller"
    ]


def test_the_first_twenty_places_are_named():
    assert len(storable.problems([float("nan")] * 30, "")) == storable.MAX_TOLD


def test_every_kind_of_value_that_json_has_not_is_named_with_its_place():
    value = {"a": [1.5, float("inf")], "b": {3: {1}, (1,): 2}, "c": "x\ud800", "d\udfff": 1}
    assert [str(problem) for problem in storable.problems(value, "")] == [
        "a[1]: got inf, wanted a number that JSON has; write a finite one",
        "b.3: got a value of type set, which JSON has not; write text or numbers",
        "b: got the key (1,), wanted text; write it in quotes",
        "c: has half a character (a surrogate), which no JSON has; write the character itself",
        "d\\udfff: has half a character (a surrogate), which no JSON has; write the character itself",
    ]
    assert [problem.field for problem in storable.problems(float("inf"), "")] == ["manifest"]


def test_what_can_be_stored_is_json_and_a_date_its_text():
    import datetime

    value = {"day": datetime.date(2026, 11, 21), "é": [None, True, 1.5]}
    assert storable.dumps(value) == '{"day": "2026-11-21", "é": [null, true, 1.5]}'
    assert storable.problems(value, "spec") == []
    for wrong, kind in ((float("nan"), ValueError), ({1}, TypeError), ("\ud800", ValueError)):
        with pytest.raises(kind):
            storable.dumps(wrong)
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(ValueError, match=r"nested too deeply|Circular"):
        storable.dumps(ring)
    with pytest.raises(ValueError, match="nested too deeply"):
        storable.dumps(nested(100_000))
