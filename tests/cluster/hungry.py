"""A job whose first env worker eats the memory of its pod, once: the kernel kills that process, or the container."""

from tests.cluster import pods
from tests.cluster.control_plane import Manifest, cartpole
from tools.testcluster.cluster import Cluster

HUNGRY = '''
import os

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class Hungry(CartPoleEnv):
    """Eats the pod's memory, once in the job: in the first pod's first env worker."""

    taken, eaten = 0, []

    def __init__(self, victim):
        super().__init__()
        self.victim = victim

    def step(self, action):
        Hungry.taken += 1
        if Hungry.taken == 500 and os.environ["RLINF_ATTEMPT"] == os.environ["RLINF_WORKER_ATTEMPT"] == "1":
            if self.victim == "agent":  # as the kernel would choose itself where the agent were larger, or under cgroup
                with open("/proc/1/oom_score_adj", "w") as file:  # v2, where all processes of a container go together
                    file.write("1000")
            while True:
                self.eaten.append(b"x" * (32 << 20))
        return super().step(action)


gymnasium.register("Hungry-v0", entry_point=Hungry, max_episode_steps=500)
'''


def job(cluster: Cluster, namespace: str, *, claim: str, victim: str) -> Manifest:
    """`cartpole`, not applied yet. `victim`: worker or agent."""
    user = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "user"}, "data": {"hungry.py": HUNGRY}}
    pods.create(cluster, namespace, user)
    manifest = cartpole(claim=claim, steps=12)
    manifest["spec"]["flow"]["config"] |= {"env": "hungry:Hungry-v0", "envKwargs": {"victim": victim}}
    (pool,) = manifest["spec"]["pools"]
    pool["slots"]["memory"] = "512Mi"
    (agent,) = pool["template"]["spec"]["containers"]
    agent["env"][0]["value"] += ":/opt/user"
    agent["volumeMounts"].append({"name": "user", "mountPath": "/opt/user"})
    pool["template"]["spec"]["volumes"].append({"name": "user", "configMap": {"name": "user"}})
    return manifest
