"""What an agent reads of the pod contract, and what it says where that is not kept."""

import pytest

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_worker.agent.identity import PodIdentity

NEEDED = {
    names.ENV_JOB_UID: "job-1",
    names.ENV_POD_NAME: "math-sim-3",
    names.ENV_POD_UID: "pod-9",
    names.ENV_POD_IP: "10.0.0.7",
    names.ENV_POOL: "sim",
    names.ENV_ORDINAL: "3",
    names.ENV_ATTEMPT: "2",
    names.ENV_SLOTS: "4",
    names.ENV_DRIVER_ADDRESS: "math-driver:7070",
}
REST = {
    names.ENV_NODE_NAME: "node-5",
    names.ENV_SLOT_RESOURCE: "nvidia.com/gpu",
    names.ENV_GRACE: "45",
    names.ENV_RUN_DIR: "/tmp/run",
    names.ENV_TLS_DIR: "/tmp/tls",
    names.ENV_OUTPUT_DIR: "/tmp/out",
    names.ENV_WORKER_LOG_DIR: "/tmp/logs",
    names.ENV_TERMINATION_LOG: "/tmp/end",
}


def test_each_variable_has_its_place():
    assert PodIdentity.read(NEEDED | REST) == PodIdentity(
        job_uid="job-1", pod="math-sim-3", pod_ip="10.0.0.7", node="node-5", pool="sim", ordinal=3, attempt=2, slots=4,
        driver_address="math-driver:7070", run_dir="/tmp/run", tls_dir="/tmp/tls", output_dir="/tmp/out",
        slot_resource="nvidia.com/gpu", grace_s=45,
        worker_log_dir="/tmp/logs", termination_log="/tmp/end",
    )  # fmt: skip


@pytest.mark.parametrize("rest", [{}, dict.fromkeys(REST, "")])
def test_what_is_not_said_is_where_a_pod_has_it_or_nowhere(rest):
    assert PodIdentity.read(NEEDED | rest) == PodIdentity(
        job_uid="job-1", pod="math-sim-3", pod_ip="10.0.0.7", node="", pool="sim", ordinal=3, attempt=2, slots=4,
        driver_address="math-driver:7070", run_dir=names.MOUNT_RUN, tls_dir=names.MOUNT_TLS, output_dir="",
        worker_log_dir="", termination_log="", grace_s=0,
    )  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_one_that_is_missing_or_empty_is_named(name):
    for environ in ({k: v for k, v in NEEDED.items() if k != name}, NEEDED | {name: ""}):
        with pytest.raises(UserError) as error:
            PodIdentity.read(environ)
        assert str(error.value) == (
            f"the pod contract is not kept: got no {name}, wanted every variable of rlinf_api.names.ENVIRONMENT that "
            "an agent reads; start agents by the operator or by `rljob run`"
        )


def test_all_that_are_missing_are_named_at_once():
    with pytest.raises(UserError, match=f"got no {names.ENV_JOB_UID}, {names.ENV_POD_NAME}, "):
        PodIdentity.read({})


@pytest.mark.parametrize("name", [names.ENV_ORDINAL, names.ENV_ATTEMPT, names.ENV_SLOTS, names.ENV_GRACE])
def test_a_number_that_is_none_is_named_with_what_it_says(name):
    with pytest.raises(UserError, match=f"^{name} is not a number: got 'two'$"):
        PodIdentity.read(NEEDED | {name: "two"})


def test_the_socket_lies_in_the_run_folder_whose_path_linux_bounds():
    longest = "/" + "r" * (107 - len("//agent.sock"))
    assert PodIdentity.read(NEEDED | {names.ENV_RUN_DIR: longest}).socket_path == f"{longest}/agent.sock"
    for folder in (longest + "r", longest[:-1] + "ö"):  # bytes count, not characters
        with pytest.raises(UserError) as error:
            PodIdentity.read(NEEDED | {names.ENV_RUN_DIR: folder})
        assert str(error.value) == (
            f"the path of the agent's socket is too long for Linux: {folder}/agent.sock: got 108 bytes, wanted at most "
            f"107; use a shorter {names.ENV_RUN_DIR} (in local mode a work dir nearer to the root)"
        )
