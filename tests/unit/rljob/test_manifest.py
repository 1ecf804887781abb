"""What is wrong with a manifest, in sentences; what --set changes."""

import copy
import re
import subprocess
import sys

import pytest
import yaml

from rlinf_api.errors import InvalidManifest
from rljob import manifest
from tests.rljob_runs import EXAMPLE, rljob

JOB = yaml.safe_load(EXAMPLE.read_text())


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


def problems(*sets, **changes):
    job = copy.deepcopy(JOB)
    job["spec"] |= changes
    manifest.override(job, sets)
    return list(map(str, manifest.check(job).problems))


def refused(text, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InvalidManifest) as raised:
        manifest.read(path)
    return str(raised.value).replace(str(path), "FILE")


def test_the_example_is_valid():
    assert problems() == []


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("spec.flow.setps=3", "spec.flow.setps: is not a field; did you mean 'steps'\\? Known here: config, .*"),
        ("spec.flow.steps=many", "spec.flow.steps: got 'many', wanted a whole number; write that"),
        ("spec.roles=3", "spec.roles: got 3, wanted a list; write that"),
        (
            "spec.pools[cpu].roles=[env, rollout]",
            "spec.roles\\[actor\\]: no pool may run role 'actor'; add it to spec.pools\\[\\*\\].roles of one of cpu",
        ),
        (
            "spec.pools[cpu].slots.perPod=2",
            "spec.roles\\[actor\\]: role 'actor' needs 1 worker of 1 slot, none fits into pool cpu beside env, "
            "rollout; raise spec.pools\\[cpu\\].pods or write spec.placement.mode: Collocated, "
            "so that roles take turns",
        ),
        ("spec.flow.config.gamma=1.5", "spec.flow.config.gamma: got 1.5, wanted at most 1.0; change it"),
        ("spec.flow.config.gama=1", "spec.flow.config.gama: is not a field; did you mean 'gamma'\\? Known here: .*"),
        ("spec.flow.config.slices=5", "spec.flow.config: slices 5 does not divide numEnvs 32; write a divisor"),
        (
            "spec.flow.name=ppp",
            "spec.flow.name: 'ppp' is not a registered flow; did you mean 'ppo'\\? write ppo or grpo or synthetic, .*",
        ),
        ("spec.roles[env].kind=gymnasiun", ".*'gymnasiun' is not a registered kind; did you mean 'gymnasium'\\?.*"),
        ("spec.checkpoint={uri: 'file://runs'}", "spec.checkpoint.uri: got 'file://runs', wanted an absolute path; .*"),
        ("spec.checkpoint={uri: runs/a}", "spec.checkpoint.uri: got 'runs/a', wanted an absolute path; write file:.*"),
        (
            "spec.checkpoint={uri: 'file:///lr#1'}",
            "spec.checkpoint.uri: got 'file:///lr#1', .*; write '#' as %23, or .*",
        ),
        (
            "spec.checkpoint={uri: 'file:///a?b'}",
            "spec.checkpoint.uri: got 'file:///a\\?b', .*; write '\\?' as %3F, or .*",
        ),
        (
            "spec.checkpoint={uri: 'file:///a%00b'}",
            "spec.checkpoint.uri: got 'file:///a%00b', which has a character .*",
        ),
        (
            "spec.checkpoint={uri: 'az://a'}",
            "spec.checkpoint.uri: scheme 'az://' is not supported yet .* s3:// or gs://",
        ),
        ("spec.checkpoint={uri: 's3://a'}", "spec.checkpoint.uri: got 's3://a', wanted a bucket and .*; write s3://.*"),
    ],
)
def test_each_problem_is_one_sentence(assignment, sentence):
    [found] = problems(assignment)
    assert re.fullmatch(sentence, found), found


@pytest.mark.parametrize("uri", ["/data/lr#1?x%00", "file:///data/lr%231%3Fx", "file:///data/a b"])
def test_a_path_is_what_it_says_and_a_uri_is_quoted(uri):
    assert problems(f"spec.checkpoint={{uri: '{uri}'}}") == []


def test_all_problems_are_told_at_once():
    assert len(problems("spec.flow.setps=3", "spec.flow.steps=x", "spec.seed=a")) == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "manifest FILE must hold one RLJob: got nothing, wanted one mapping with apiVersion, kind, .*"),
        ("- 1", "manifest FILE must hold one RLJob: got a list, .*"),
        ("a: 1\n---\nb: 2", "manifest FILE must hold one RLJob: got 2 documents, .*"),
        ("a: [1,\n b", "manifest FILE is not YAML: got while parsing a flow sequence .*; correct that line"),
        ("a: \x00", "manifest FILE is not YAML: .*"),
        ("a: 2020-13-45", "manifest FILE is not YAML: got month must be in 1..12; correct that value"),
        ("a: !!int foo", "manifest FILE is not YAML: got invalid literal for int.*; correct that value"),
        ("a: " + "9" * 5000, "manifest FILE is not YAML: got Exceeds the limit .*; correct that value"),
        ("[" * 100_000, "manifest FILE is nested too deeply: got more than 100 levels, .*"),
        ("a: 1\nb: 2\na: 3", "manifest FILE has key 'a' twice: got line 1 and line 3, wanted each key once; remove .*"),
        ("s:\n- {a: 1, a: 1}", "manifest FILE has key 'a' twice: got line 2 and line 2, wanted each key once; .*"),
        ("spec: {a: &a {x: *a}}", "manifest FILE: spec.a.x: holds itself; write it out without the alias, or flatter"),
        ("spec: {a: .nan}", "manifest FILE: spec.a: got nan, wanted a number that JSON has; write a finite one"),
        ("spec: {a: !!set {b}}", "manifest FILE: spec.a: got a value of type set, which JSON has not; write text .*"),
        (
            "metadata: {2020-01-02: 1}",
            "manifest FILE: metadata: got the key datetime.date.2020, 1, 2., wanted text; .*",
        ),
        (LAUGHS, "manifest FILE: manifest: is larger than 3145728 characters with its aliases written out; .*"),
    ],
)
def test_a_file_that_holds_no_job_is_refused(text, sentence, tmp_path):
    assert re.fullmatch(sentence, refused(text, tmp_path))


def test_an_alias_and_a_merged_key_are_no_doubles(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\nd: [*a, *a]\n")
    found = manifest.read(path)
    assert (found["b"], found["c"]) == ({"x": 3, "y": 2}, {"x": 3, "y": 4})


def test_a_file_that_cannot_be_read_is_no_traceback(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        done = rljob("validate", path)
        assert done.returncode == 2
        assert re.fullmatch(f"manifest {path} cannot be read: got .*; check the path\n", done.stderr)


@pytest.mark.parametrize("command", [("validate", "-"), ("run", "-"), ("plan", "set", "WORK", "-")])
def test_standard_input_that_is_closed_is_no_traceback(command, tmp_path):
    words = [str(tmp_path) if word == "WORK" else word for word in command]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "rljob", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(
        r"(manifest|plan) - cannot be read: got standard input is closed; name a file, or .*\n", done.stderr
    )


def test_set_reaches_fields_and_list_entries_by_name():
    job = copy.deepcopy(JOB)
    manifest.override(job, ["spec.roles[env].workers=2", "spec.roles[0].config={a: 1}", "spec.checkpoint.keep=2"])
    assert job["spec"]["roles"][0] == {"name": "env", "kind": "gymnasium", "workers": 2, "config": {"a": 1}}
    assert job["spec"]["checkpoint"] == {"keep": 2}
    manifest.override(job, ["spec.roles[actor]={name: actor, kind: fsdp, workers: 2}"])
    assert job["spec"]["roles"][2]["workers"] == 2


SHARED = """
spec:
  pools:
  - {name: a, slots: &s {perPod: 1}}
  - {name: b, slots: *s}
  flow: {config: {xs: [1, 1, 2]}}
"""


def test_set_changes_the_place_that_it_names_and_no_other(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(SHARED)
    spec = manifest.read(path)
    manifest.override(spec, ["spec.pools[a].slots.perPod=4", "spec.flow.config.xs[1]=9", "spec.flow.config.xs.2=8"])
    manifest.override(spec, ["spec.flow.config.ys=[&v {w: [1]}, *v]", "spec.flow.config.ys[1].w=2"])
    pools, config = spec["spec"]["pools"], spec["spec"]["flow"]["config"]
    assert [pool["slots"] for pool in pools] == [{"perPod": 4}, {"perPod": 1}], "an alias was a text's, not a thing's"
    assert config["ys"] == [{"w": [1]}, {"w": 2}]
    assert config["xs"] == [1, 9, 8], "an entry is its place and not its value"


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("nonsense", "--set cannot be read: got 'nonsense', wanted spec.path=value; write for example .*"),
        ("metadata.name=x", "--set cannot be read: got 'metadata.name=x', wanted spec.path=value; .*"),
        ("spec.seed=2020-13-45", "--set spec.seed: the value is not YAML: got '2020-13-45', wanted .*; quote it .*"),
        ("spec.seed={a: 1, a: 2}", "--set spec.seed has key 'a' twice: got line 1 and line 1, .*"),
        ("spec.seed=&a [*a]", "--set spec.seed: .*holds itself; .*"),
        ("spec.flow.steps=[1", "--set spec.flow.steps: the value is not YAML: got '\\[1', wanted .*; quote it .*"),
        ("spec.roles[envy].workers=3", "--set .*: the list has no such entry: got 'envy', wanted one of env, .*; .*"),
        ("spec.pools[cpu].roles[9]=a", "--set .*: the list has no such entry: got '9', wanted one of 0 to 2; .*"),
        ("spec.flow.steps.deep=3", "--set .*: nothing can be set below a plain value: got 'deep' below 97, .*; .*"),
        ("spec.flow.steps.deep.er=3", "--set .*: nothing can be set below a plain value: got 'deep' below 97, .*"),
    ],
)
def test_nonsense_in_set_says_what_to_write(assignment, sentence):
    with pytest.raises(InvalidManifest) as raised:
        manifest.override(copy.deepcopy(JOB), [assignment])
    assert re.fullmatch(sentence, str(raised.value)), raised.value
