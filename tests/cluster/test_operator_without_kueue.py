"""A job with a queue's label where nobody serves queues: it waits without a pod, until the label is off."""

from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane, cartpole, refused_calls
from tests.cluster.kueues import LABEL, said
from tests.cluster.test_operator_kueue import queued
from tools.testcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


def test_a_job_whose_queue_nobody_serves_has_no_pod_until_its_label_is_off(
    cluster: Cluster, namespace: str, tmp_path: Path
):
    with ControlPlane(cluster, tmp_path) as plane:
        plane.apply(namespace, queued(cartpole(claim="none")))
        waits = plane.until(
            namespace, "cartpole", lambda job: said(job, "Admitted") == ("False", "NoProvider"), what="NoProvider"
        )
        assert waits["status"]["state"] == "Queued"
        plane.touch(namespace, "cartpole")
        assert plane.pods(namespace) == []
        cluster.kubectl("-n", namespace, "label", "rljob", "cartpole", f"{LABEL}-")
        plane.until(
            namespace, "cartpole", lambda job: said(job, "Admitted") == ("True", "NoQueue"), what="no queue any more"
        )
        plane.until(namespace, "cartpole", lambda _: plane.pods(namespace), what="pods")
        assert refused_calls(plane.operator) == []
