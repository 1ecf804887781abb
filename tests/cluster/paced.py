"""A job whose environment takes its time until the test says `go`: it is in the middle of its work for as long as
something is broken, on machines of any speed, costs few cycles meanwhile, and is through in seconds afterwards.

    with Paced(cluster, namespace, claim=claim) as paced:
        plane.apply(namespace, paced.job(steps=STEPS))
        ...                                                # break something; wait for what comes of it
        paced.go()
        plane.until(namespace, "cartpole", is_complete, what="Complete")

The environment is that of the conformance suite. Pods see `go` through a folder of this machine at once, those that
start later, too; a ConfigMap would take the kubelet a minute.
"""

import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.cluster import pods, worker_image
from tests.cluster.control_plane import Manifest, cartpole
from tests.conformance.world import CODE, ENVS_FILE, ENVS_MOUNT, MOUNT
from tools.testcluster.cluster import Cluster

STEPS = 100
"""80 s at least until `go`, 16 steps of an environment for each: longer than what happens while they are made takes,
also when a recovery has begun at the first step again. A worker that is away makes none."""
SMALL = {"numEnvs": 2, "slices": 1, "horizon": 8, "epochs": 1, "minibatches": 1}
CHECKPOINTS = "checkpoints"
"""A folder of MOUNT that pods may write to."""
FOLDERS = Path("/var/tmp")
"""Nodes see it, and a pod's user may look into it: neither holds for pytest's own folder."""


class Paced:
    def __init__(self, cluster: Cluster, namespace: str, *, claim: str) -> None:
        """`claim`: the machine's site-packages."""
        self._cluster, self._namespace, self._claim = cluster, namespace, claim
        self._folder = Path(tempfile.mkdtemp(prefix="rlinf-paced-", dir=FOLDERS))

    def __enter__(self) -> Self:
        try:
            self._folder.chmod(0o755)
            checkpoints = self._folder / CHECKPOINTS
            checkpoints.mkdir()
            checkpoints.chmod(0o777)  # the pods' user is not ours
            envs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "paced"}, "data": CODE}
            pods.create(self._cluster, self._namespace, envs)
            self._cluster.site_packages_volume(self._namespace, name="paced", folder=self._folder)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.api.delete(f"/api/v1/persistentvolumes/{self._namespace}-paced")
        shutil.rmtree(self._folder)

    def go(self) -> None:
        """From here on a step takes what it takes."""
        (self._folder / "go").touch()

    @property
    def checkpoints(self) -> str:
        """A place that its pods may write to, as spec.checkpoint.uri."""
        return f"file://{MOUNT}/{CHECKPOINTS}"

    def job(self, *, steps: int = STEPS, **spec: Any) -> Manifest:
        """`cartpole` with this environment; it asks for little, as it does little."""
        manifest = cartpole(claim=self._claim, steps=steps, **spec)
        manifest["spec"]["flow"]["config"] |= SMALL | {"env": f"{ENVS_FILE.stem}:Paced-v0"}
        (pool,) = manifest["spec"]["pools"]
        pool["slots"] |= {"cpu": "100m", "memory": "600Mi"}
        template = pool["template"]["spec"]
        (agent,) = template["containers"]
        agent["env"] = [
            {"name": "PYTHONPATH", "value": f"{ENVS_MOUNT}:{worker_image.MOUNT}"},
            {"name": "CONFORMANCE_DIR", "value": MOUNT},
        ]
        agent["volumeMounts"] += [
            {"name": "paced-env", "mountPath": ENVS_MOUNT, "readOnly": True},
            {"name": "paced", "mountPath": MOUNT},
        ]
        template["volumes"] += [
            {"name": "paced-env", "configMap": {"name": "paced"}},
            {"name": "paced", "persistentVolumeClaim": {"claimName": "paced"}},
        ]
        return manifest
