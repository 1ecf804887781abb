"""The chart's own files: values with their reasons, a schema that misses none, generated parts that are current."""

import json

import pytest
import yaml

from rlinf_operator import access, process
from rlinf_operator.settings import OperatorSettings
from tools import gen_chart_crds, gen_chart_values, gen_crds
from tools.chart import images, rendering, schemas

VALUES = (rendering.CHART / "values.yaml").read_text(encoding="utf-8")
SCHEMA = json.loads((rendering.CHART / "values.schema.json").read_text(encoding="utf-8"))


def schema_at(path):
    node = SCHEMA
    for key in path.split("."):
        node = resolved(node)["properties"].get(key)
        if node is None:
            return None
    return resolved(node)


def resolved(node):
    return SCHEMA["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def leaves(node, path=""):
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


@pytest.mark.parametrize("generator", [gen_chart_crds, gen_chart_values])
def test_generated_parts_are_what_their_sources_say(generator):
    stale = [str(path) for path, text in generator.documents().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run `make generate` and commit"


def test_every_value_has_a_comment_that_ends_as_a_sentence():
    for value in gen_chart_values.values(VALUES):
        assert value.text.endswith("."), value


def test_the_table_of_values_misses_none():
    told = [value.path for value in gen_chart_values.values(VALUES)]
    for leaf in leaves(yaml.safe_load(VALUES)):
        assert any(leaf == path or leaf.startswith(f"{path}.") for path in told), leaf


def test_a_value_without_a_comment_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"line 2: a\.b has no comment"):
        gen_chart_values.values("a:\n  b: 3\n")


def test_every_value_is_in_the_schema():
    for leaf in leaves(yaml.safe_load(VALUES)):
        if not leaf.startswith(("operator.resources.", "scheduler.resources.", "runtimes.")):
            path, inside, _ = leaf.partition(".nodeSelector.")  # names of labels, which any may be
            assert schema_at(path + inside.rstrip(".")) is not None, leaf


def test_the_schema_is_strict_everywhere_but_in_what_is_every_charts():
    def look(node, path):
        if isinstance(node, dict):
            if "properties" in node and node.get("type") == "object" and path != ".properties.global":
                assert node.get("additionalProperties") is False, path
            for key, value in node.items():
                look(value, f"{path}.{key}")

    look(SCHEMA, "")


def test_every_default_has_the_type_that_the_schema_wants():
    kinds = {"string": str, "boolean": bool, "integer": int, "array": list, "object": dict}

    def look(value, path):
        node = schema_at(path)
        wanted = node.get("type")
        if isinstance(wanted, str):
            assert isinstance(value, kinds[wanted]), path
        if "enum" in node:
            assert value in node["enum"], path
        if isinstance(value, dict) and "properties" in node:
            for key, sub in value.items():
                look(sub, f"{path}.{key}")

    for key, value in yaml.safe_load(VALUES).items():
        look(value, key)


def test_settings_that_the_chart_sets_itself_are_no_values():
    settings = SCHEMA["properties"]["operator"]["properties"]["settings"]["properties"]
    assert not gen_chart_values.BY_CHART & settings.keys()
    known, _ = process.read(dict.fromkeys(settings), {})
    assert known == process.ProcessSettings()
    assert all(node["description"].startswith("Default ") for node in settings.values())


def test_the_chart_knows_the_schedulers_of_gangs_that_the_operator_knows():
    named = SCHEMA["properties"]["gangScheduler"]["properties"]["name"]["enum"]
    assert tuple(named) == process.GANG_SCHEDULERS


@pytest.mark.parametrize("name", sorted(gen_crds.documents()))
def test_a_crd_of_the_chart_differs_from_the_one_for_kubectl_by_its_metadata_only(name):
    text = (gen_chart_crds.TEMPLATES / "crds" / name).read_text(encoding="utf-8")
    assert "helm.sh/resource-policy: keep" in text
    plain = "\n".join(line for line in text.splitlines() if "{{" not in line)
    crd = yaml.safe_load(plain)
    crd["metadata"] = {"name": crd["metadata"]["name"]}
    assert crd == yaml.safe_load(gen_crds.documents()[name])


def test_braces_in_a_crd_are_refused_before_helm_trips_over_them():
    with pytest.raises(ValueError, match="write that description without it"):
        gen_chart_crds.crd_template("metadata:\n  name: x\nspec:\n  description: '{{ job }}'\n")


def test_a_rule_keeps_its_reason_as_a_comment():
    rule = access.AccessRule(group="", resource="pods", verbs=("get",), why="because", names=("one",))
    text = gen_chart_crds.rules_template({"operator": [rule]})
    assert '# because\n- {apiGroups: [""], resources: [pods], resourceNames: [one], verbs: [get]}\n' in text


def test_a_strict_schema_refuses_fields_that_a_kind_has_not():
    pod = {"type": "object", "properties": {"spec": {"$ref": "#/components/schemas/spec", "description": "x"}}}
    found = schemas.standalone("pod", {"pod": pod, "spec": {"type": "object", "properties": {}}, "other": {}})
    assert found["definitions"].keys() == {"pod", "spec"}
    assert found["definitions"]["pod"]["additionalProperties"] is False
    assert found["definitions"]["pod"]["properties"]["spec"] == {"$ref": "#/definitions/spec"}


def test_images_are_named_after_their_folders_and_the_version():
    known = images.catalogue()
    assert known["control"].name == f"rlinf-operator:{yaml.safe_load(chart_yaml())['appVersion']}"
    assert known["control"].bases() == ["python:3.11-slim-bookworm"]
    assert known["base"].name == OperatorSettings().driver_image
    assert known["actor-fsdp"].name == OperatorSettings().worker_image
    assert known["env-sim"].bases() == ["python:3.11-slim-bookworm"]


def chart_yaml():
    return (rendering.CHART / "Chart.yaml").read_text(encoding="utf-8")
