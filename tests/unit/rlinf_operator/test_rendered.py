"""The objects of one small job, whole, as they stand in rendered/: what changes there, changes in every cluster."""

from pathlib import Path

import pytest
import yaml

from rlinf_api import __version__
from rlinf_operator.manifests import config, network, pods
from rlinf_operator.manifests.metadata import JobMeta
from rlinf_operator.settings import OperatorSettings
from tests.builders import NOW, UID, ppo_job

JOB = JobMeta(namespace="team", name="math", uid=UID)
SPEC = ppo_job().parsed()
SETTINGS = OperatorSettings(
    worker_image="worker:1",
    driver_image="driver:1",
    scheduler_address="rlinf-scheduler:7080",
    default_checkpoint_uri="/data/{namespace}/{job}-{uid}",
    driver_grace_s=31,
    worker_grace_s=32,
    node_lost_toleration_s=7,
)


def driver():
    return pods.driver(JOB, SPEC, attempt=3, life=2, settings=SETTINGS, first_of_life=True).manifest


def worker():
    return pods.worker(JOB, SPEC, pool="sim", ordinal=1, attempt=4, life=2, settings=SETTINGS).manifest


def service():
    return network.headless(JOB)


def policy():
    return network.policy(JOB, SPEC, settings=SETTINGS)


def config_map():
    return config.config_map(JOB, SPEC, certificates_expire=NOW, issuer="abc")


@pytest.mark.parametrize("made", [driver, worker, service, policy, config_map], ids=lambda made: made.__name__)
def test_an_object_is_rendered_as_it_stands_in_its_file(made):
    text = (Path(__file__).parent / "rendered" / f"{made.__name__}.yaml").read_text(encoding="utf-8")
    assert made() == yaml.safe_load(text.replace("VERSION", __version__))


@pytest.mark.parametrize(
    ("resource", "shm", "allocator"), [("nvidia.com/gpu", "8Gi", "expandable_segments:False"), ("", "1Gi", None)]
)
def test_a_pool_with_accelerators_has_room_for_nccl_and_memory_that_can_be_shared(resource, shm, allocator):
    job = ppo_job()
    job.spec["pools"][1]["slots"] |= {"resource": resource} if resource else {}
    pod = pods.worker(JOB, job.parsed(), pool="train", ordinal=0, attempt=1, life=1, settings=SETTINGS).manifest["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["rlinf-shm"] == {"name": "rlinf-shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}}
    environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert environment.get("PYTORCH_CUDA_ALLOC_CONF") == allocator


def test_a_driver_of_the_users_flow_takes_the_first_image_that_a_pool_names_or_the_operators():
    job = ppo_job()
    job.spec["flow"] = {"name": "mine:flow"}

    def image():
        pod = pods.driver(JOB, job.parsed(), attempt=1, life=1, settings=SETTINGS).manifest
        return pod["spec"]["containers"][0]["image"]

    assert image() == "driver:1"
    for number, containers in (
        (1, [{"name": "side", "image": "side:1"}, {"name": "agent", "image": "mine:2"}]),
        (0, [{"name": "agent"}]),
    ):
        job.spec["pools"][number]["template"] = {"spec": {"containers": containers}}
    assert image() == "mine:2"
