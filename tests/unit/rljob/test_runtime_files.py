"""Where `rljob` finds the RLRuntime that a job names: in the file of the job, or in one beside it."""

import copy
import subprocess
import sys

import pytest
import yaml

from rlinf_api.errors import InvalidManifest
from rljob import manifest
from rljob.run import Options, _checked, to_go_on
from tests.rljob_runs import EXAMPLE

JOB = yaml.safe_load(EXAMPLE.read_text())
GPU = {
    "apiVersion": "rlinf.io/v1alpha1", "kind": "RLRuntime", "metadata": {"name": "gpu"},
    "spec": {"template": {"spec": {"priorityClassName": "low"}}, "poolDefaults": {"slots": {"memory": "3Gi"}}},
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """(a job that names gpu, gpu), as files."""
    job = copy.deepcopy(JOB)
    job["spec"]["runtime"] = "gpu"
    for pool in job["spec"]["pools"]:
        pool.get("slots", {}).pop("memory", None)
    found = tmp_path / "job.yaml", tmp_path / "gpu.yaml"
    for path, document in zip(found, (job, GPU), strict=True):
        path.write_text(yaml.safe_dump(document))
    return found


def together(files, tmp_path):
    path = tmp_path / "both.yaml"
    path.write_text("---\n".join(file.read_text() for file in files))
    return path


def validate(*words):
    argv = [sys.executable, "-m", "rljob", "validate", *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_job_is_checked_with_the_runtime_that_stands_beside_it(files, tmp_path):
    job, gpu = files
    for code, said in (validate(together(files, tmp_path)), validate(job, "--runtime", gpu)):
        assert (code, said.endswith("RLJob cartpole is valid\n")) == (0, True), said


def test_a_runtime_that_no_file_holds_is_named_with_the_way_to_get_it(files):
    code, said = validate(files[0])
    assert code == 2
    assert said == (
        "spec.runtime: names RLRuntime 'gpu', which no file here holds: got no runtime; add it to the file as another "
        "document, or name its file: --runtime FILE (kubectl get rlruntime gpu -o yaml)\n"
    )


def test_runtimes_alone_are_checked_as_well(files, tmp_path):
    code, said = validate(files[1])
    assert (code, said) == (0, f"{files[1]}: RLRuntime gpu is valid\n")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump({**GPU, "spec": {"quee": "a"}}))
    code, said = validate(wrong)
    assert code == 2
    assert said.startswith("RLRuntime gpu: spec.quee: is not a field; did you mean 'queue'?")


@pytest.mark.parametrize(
    ("documents", "sentence"),
    [
        ([JOB, JOB], "manifest FILE must hold one RLJob: got 2 documents"),
        ([JOB, GPU, GPU], "RLRuntime 'gpu' is given twice"),
        ([JOB, {**GPU, "metadata": {}}], "FILE must hold RLRuntimes beside the job"),
        ([JOB, {"kind": "ConfigMap"}], "manifest FILE must hold one RLJob: got 2 documents"),
    ],
)
def test_other_documents_are_refused(tmp_path, documents, sentence):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    with pytest.raises(InvalidManifest) as raised:
        manifest.read(path)
    assert str(raised.value).replace(str(path), "FILE").startswith(sentence)


def test_a_run_has_the_runtimes_words_under_its_own_and_those_of_set(files):
    job, gpu = files
    options = Options(file=job, runtimes=(gpu,))
    spec = _checked(options).spec
    assert spec is not None
    assert (spec.runtime, spec.pools[0].slots.memory) == (None, "3Gi")
    assert spec.template == {"spec": {"priorityClassName": "low"}}
    pool = spec.pools[0].name
    changed = Options(file=job, runtimes=(gpu,), assignments=(f"spec.pools[{pool}].slots={{memory: 1Gi}}",))
    again = _checked(changed).spec
    assert again is not None
    assert again.pools[0].slots.memory == "1Gi"
    assert to_go_on(options, spec, work_dir=job.parent).endswith(f"--runtime {gpu}")
