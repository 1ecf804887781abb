"""Schedulers of gangs in the hub, beside the cluster's own: coscheduling (a plugin of scheduler-plugins) and Volcano.

    testcluster up --with coscheduling
    testcluster up --with volcano

The stock programs of their modules (go-coscheduling, go-volcano), with the configurations that their charts have where
it is about gangs. Of Volcano its controllers run too, those of PodGroups and queues: a pod that names no group gets one
by them. Its webhooks do not. `Cluster` calls this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tools.testcluster import binaries, hooked
from tools.testcluster.api import Api
from tools.testcluster.layout import Addresses, Paths

SERVED_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gangs:
    build: binaries.BuildSet
    group_version: str
    kinds: tuple[str, ...]
    """Plurals that are to be served before the programs start."""
    configuration: Callable[[Path], dict[str, Any]]
    """By the kubeconfig."""
    programs: Mapping[str, tuple[str, ...]]
    """Flags of each, the kubeconfig's apart; {config} is the file of the configuration."""


def _coscheduling(kubeconfig: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 500, "burst": 1000},
        "profiles": [
            {
                "schedulerName": "scheduler-plugins-scheduler",
                "plugins": {"multiPoint": {
                    "enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "PrioritySort"}],
                }},
                "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 10}}],
            }
        ],
    }  # fmt: skip


def _volcano(_: Path) -> dict[str, Any]:
    names = (("priority", "gang", "conformance"), ("overcommit", "drf", "predicates", "proportion", "nodeorder"))
    return {
        "actions": "enqueue, allocate, backfill",
        "tiers": [{"plugins": [{"name": name} for name in tier]} for tier in names],
    }


ALL: Final[Mapping[str, Gangs]] = {
    "coscheduling": Gangs(
        build=binaries.COSCHEDULING,
        group_version="scheduling.x-k8s.io/v1alpha1",
        kinds=("podgroups",),
        configuration=_coscheduling,
        programs={"coscheduling": ("--config={config}", "--secure-port=0")},
    ),
    "volcano": Gangs(
        build=binaries.VOLCANO,
        group_version="scheduling.volcano.sh/v1beta1",
        kinds=("podgroups", "queues"),
        configuration=_volcano,
        programs={
            "volcano": ("--scheduler-conf={config}", "--leader-elect=false", "--cache-dumper=false"),
            "volcano-controllers": ("--controllers=pg-controller,queue-controller", "--leader-elect=false"),
        },
    ),
}


def of_program(program: str) -> str | None:
    """
    >>> of_program("volcano-controllers"), of_program("kwok")
    ('volcano', None)
    """
    return next((name for name, one in ALL.items() if program in one.programs), None)


def prepare(name: str, paths: Paths, addresses: Addresses, api: Api, *, wait: hooked.Wait) -> dict[str, list[str]]:
    """Rights, configuration and kinds, unless they are there; the words of each program."""
    one = ALL[name]
    folder = binaries.ready(one.build)
    hooked.give_rights(paths, addresses, name)
    config, kubeconfig = paths.config / f"{name}.yaml", hooked.kubeconfig(paths, name)
    config.write_text(yaml.safe_dump(one.configuration(kubeconfig)), encoding="utf-8")
    if not hooked.is_served(api, one.group_version, one.kinds):
        hooked.make_kinds(api, folder / "crds", change=lambda found: found)
        wait(
            lambda: hooked.is_served(api, one.group_version, one.kinds),
            what=f"the API server to serve {one.group_version}", timeout_s=SERVED_TIMEOUT_S,
        )  # fmt: skip
    return {
        program: [str(folder / program), f"--kubeconfig={kubeconfig}", *(flag.format(config=config) for flag in flags)]
        for program, flags in one.programs.items()
    }
