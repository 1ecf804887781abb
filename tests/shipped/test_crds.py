"""The CRDs are what the models say, structural as Kubernetes wants them, and hold what the operator writes."""

import re

import pytest
import yaml

from rlinf_api import edits, supported
from rlinf_api import job as api
from tests.builders import ppo_job
from tools import gen_crds

DOCUMENTS = gen_crds.documents()
CRDS = {name: yaml.safe_load(text) for name, text in DOCUMENTS.items()}
FILES = sorted(DOCUMENTS)
RUNTIMES = "rlinf.io_rlruntimes.yaml"
"""Of the whole cluster."""
PROFILES = "rlinf.io_rlprofiles.yaml"
"""Written whole, by the scheduler alone: nobody joins lists in it."""
WITH_STATUS = [name for name in FILES if name not in (RUNTIMES, PROFILES)]
"""The others have a spec alone, which is kept as it was written."""
COMBINERS = {"anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "title", "const", "examples"}


def crd(name):
    return CRDS[name]


def root(name):
    return crd(name)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(node, path=""):
    """Every schema below a schema, with its path."""
    yield path, node
    for name, sub in node.get("properties", {}).items():
        yield from nodes(sub, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from nodes(node[key], f"{path}[]")


@pytest.mark.parametrize("name", FILES)
def test_the_committed_file_is_what_the_models_say(name):
    committed = (gen_crds.FOLDER / name).read_text(encoding="utf-8")
    assert committed == DOCUMENTS[name], "run `make generate` and commit crds/"


@pytest.mark.parametrize("name", FILES)
def test_a_crd_stays_small_enough_for_kubectl_apply(name):
    assert len(DOCUMENTS[name].encode()) <= 200 * 1024


@pytest.mark.parametrize("name", FILES)
def test_every_node_is_structural(name):
    for path, node in nodes(root(name)):
        assert not COMBINERS & node.keys(), f"{path} has {COMBINERS & node.keys()}"
        assert "type" in node or node.get("x-kubernetes-preserve-unknown-fields"), f"{path} has no type"
        assert node.get("default", ...) is not None, f"{path} has default null"
        if node.get("type") == "array":
            assert "items" in node, f"{path} has no items"


@pytest.mark.parametrize("name", FILES)
def test_no_default_holds_a_null(name):
    """The API server refused the whole CRD for one."""
    for path, node in nodes(root(name)):
        if isinstance(node.get("default"), dict):
            assert None not in node["default"].values(), path


@pytest.mark.parametrize("name", FILES)
def test_list_maps_name_a_required_key_of_their_entries(name):
    found = 0
    for path, node in nodes(root(name)):
        if node.get("x-kubernetes-list-type") == "map":
            found += 1
            for key in node["x-kubernetes-list-map-keys"]:
                entry = node["items"]
                assert key in entry["required"] or "default" in entry["properties"][key], f"{path} key {key}"
    assert found >= {RUNTIMES: 1, PROFILES: 0}.get(name, 3)


def rules(name):
    return [(path, rule) for path, node in nodes(root(name)) for rule in node.get("x-kubernetes-validations", [])]


def test_every_rule_names_its_field_and_the_remedy():
    every = [entry for name in FILES for entry in rules(name)]
    assert len(every) >= 8
    for path, rule in every:
        assert re.match(r"^(spec|metadata)\b", rule["message"]), f"{path}: {rule['message']!r} names no field"
        assert "; " in rule["message"], f"{path}: {rule['message']!r} has no remedy"


@pytest.mark.parametrize("name", FILES)
def test_what_a_rule_looks_at_is_bounded_so_that_its_cost_is(name):
    spec = root(name)["properties"]["spec"]
    for path, node in nodes(spec):
        if node.get("type") == "array" and not path.startswith(".status"):
            assert "maxItems" in node, f"spec{path} has no maxItems"
        plain_string = node.get("type") == "string" and "enum" not in node
        assert not plain_string or "maxLength" in node, f"spec{path} has no maxLength"


@pytest.mark.parametrize(("listed", "field"), [("roles", "workers"), ("pools", "pods")])
def test_a_number_or_a_range_is_bounded_whichever_of_them_it_is(listed, field):
    """CEL does not see a node without a type; bounds hold there all the same."""
    spec = root("rlinf.io_rljobs.yaml")["properties"]["spec"]
    node = spec["properties"][listed]["items"]["properties"][field]
    assert "type" not in node
    assert (node["minimum"], node["maximum"], node["required"]) == (1, 100_000, ["min", "max"])
    assert (node["properties"]["min"]["minimum"], node["properties"]["max"]["maximum"]) == (0, 100_000)


def test_an_edits_rule_is_over_where_nothing_was_edited_before_it_asks_for_more():
    """All of them are asked at each write of a status: the status itself, and whether the job is suspended, only where
    something has changed."""
    rules = root("rlinf.io_rljobs.yaml")["x-kubernetes-validations"]
    of_edits = [rule for rule in rules if "oldSelf" in rule["rule"]]
    assert len(of_edits) == len(edits.RULES)
    for rule in of_edits:
        same, _, rest = rule["rule"].partition(" || self.spec.suspend")
        assert "status" not in same, rule
        assert ("oldSelf.status.attempt == 0" in rest) == ("at work" in rule["message"]), rule


def test_a_plans_spec_cannot_change():
    assert {"rule": "self == oldSelf"}.items() <= root("rlinf.io_rlplans.yaml")["properties"]["spec"][
        "x-kubernetes-validations"
    ][-1].items()


@pytest.mark.parametrize("name", FILES)
def test_status_is_a_subresource_and_columns_point_at_fields_that_exist(name):
    version = crd(name)["spec"]["versions"][0]
    assert version.get("subresources") == ({"status": {}} if name in WITH_STATUS else None)
    assert crd(name)["spec"]["scope"] == ("Cluster" if name == RUNTIMES else "Namespaced")
    for column in version["additionalPrinterColumns"]:
        node = root(name)
        for part in re.sub(r"\[\?\(.*?\)\]", "[]", column["jsonPath"]).lstrip(".").split("."):
            if part in ("metadata", "creationTimestamp"):
                break
            node = node["properties"][part.removesuffix("[]")]
            node = node["items"] if part.endswith("[]") else node


def _fields(node, path=""):
    """Of a schema: (path, node) of each field."""
    for name, sub in node.get("properties", {}).items():
        yield f"{path}.{name}", sub
        yield from _fields(sub, f"{path}.{name}")
    if "items" in node:
        yield from _fields(node["items"], f"{path}[]")


def test_nothing_is_filled_into_a_runtime():
    """What it does not say, a job may; and a job at work compares the two texts."""
    assert [path for path, node in _fields(root(RUNTIMES)) if "default" in node] == []


@pytest.mark.parametrize("name", WITH_STATUS)
def test_times_of_a_status_are_times_for_clients_in_other_languages_and_nothing_is_filled_in(name):
    fields = dict(_fields(root(name)["properties"]["status"]))
    times = {path: node for path, node in fields.items() if re.search(r"(\.t|T)ime$", path)}
    assert ".conditions[].lastTransitionTime" in times
    assert {node.get("format") for node in times.values()} == {"date-time"}
    assert [path for path, node in fields.items() if "default" in node] == []


def unknown(value, node, path=""):
    """Fields that the API server would prune."""
    if node.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, dict):
        for key, sub in value.items():
            if key not in node.get("properties", {}):
                yield f"{path}.{key}"
            else:
                yield from unknown(sub, node["properties"][key], f"{path}.{key}")
    elif isinstance(value, list):
        for entry in value:
            yield from unknown(entry, node["items"], f"{path}[]")


def test_the_api_server_prunes_nothing_of_what_the_operator_and_the_scheduler_write():
    world = ppo_job().world().started()
    world.report(
        plan_revision=1, step=3, metrics={"a": 1.0}, checkpoint_uri="/c", checkpoint_step=3, step_seconds=1.0
    ).exited("math-sim-0-a1", 137).step()
    status = root("rlinf.io_rljobs.yaml")["properties"]["status"]
    assert list(unknown(api.dump(world.status), status)) == []
    plan = world.plans[0].spec
    assert plan is not None
    assert list(unknown(api.dump(plan), root("rlinf.io_rlplans.yaml")["properties"]["spec"])) == []


def test_every_example_is_valid():
    files = sorted((gen_crds.ROOT / "examples").glob("**/*.yaml"))
    jobs = [
        (f, d) for f in files for d in yaml.safe_load_all(f.read_text(encoding="utf-8")) if d and d["kind"] == "RLJob"
    ]
    assert jobs
    for file, job in jobs:
        assert [str(p) for p in supported.validate(job)[1]] == [], file
        assert list(unknown(job["spec"], root("rlinf.io_rljobs.yaml")["properties"]["spec"])) == [], file


@pytest.mark.parametrize("name", WITH_STATUS)
def test_each_field_that_may_be_selected_by_is_a_plain_one(name):
    """An API server refuses a CRD with another."""
    listed = [field["jsonPath"] for field in crd(name)["spec"]["versions"][0]["selectableFields"]]
    known = dict(nodes(root(name)))
    assert listed
    assert {known[path]["type"] for path in listed} <= {"string", "integer", "boolean"}
