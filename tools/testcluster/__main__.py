"""Commands of the test cluster: `python -m tools.testcluster up|down|list|build|images|load|fault|...`.

A person's door to the same classes that the tests use. Exit status 0, or 1 with one sentence; 2 for a wrong command.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.testcluster import binaries, gangs, images, prometheus, reaper, requirements, state
from tools.testcluster.binaries import say
from tools.testcluster.cluster import Cluster
from tools.testcluster.errors import ClusterError, MissingRequirement
from tools.testcluster.layout import Options, Paths
from tools.testcluster.machine import Process


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    try:
        return int(arguments.do(arguments) or 0)
    except ClusterError as err:
        print(f"testcluster: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.testcluster", description="A genuine Kubernetes for tests.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, do: object, help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help)
        made.set_defaults(do=do)
        return made

    up = command("up", _up, "start a cluster, or say that it runs")
    _name(up)
    up.add_argument("--nodes", type=int, default=2, help="real nodes (default 2)")
    up.add_argument("--kwok-nodes", type=int, default=0, help="fake nodes beside them")
    up.add_argument("--gang-scheduling", action="store_true", help="native gang scheduling (alpha v1alpha2 API)")
    up.add_argument("--feature-gate", action="append", default=[], metavar="NAME=true", help="for every component")
    up.add_argument("--runtime-config", action="append", default=[], metavar="API=true", help="for the API server")
    up.add_argument(
        "--resource", action="append", default=[], metavar="NAME=COUNT", help="on every node: nvidia.com/gpu=4"
    )
    up.add_argument("--dra-devices", type=int, default=0, help="fake devices per node by a DRA driver")
    up.add_argument("--node-disk-gib", type=int, default=16, help="size of a node's own (sparse) disk")
    up.add_argument("--node-grace-s", type=int, default=10, help="how long a silent node counts as Ready")
    up.add_argument("--network-policies", action="store_true", help="enforce NetworkPolicy (test-only translator)")
    up.add_argument("--prometheus", action="store_true", help="run Debian's Prometheus in the hub")
    up.add_argument(
        "--with", action="append", default=[], choices=["kueue", "jobset", *gangs.ALL], dest="others",
        help="run it in the hub",
    )  # fmt: skip
    up.add_argument("--audit", action="store_true", help="write an audit log")
    _name(command("down", _down, "remove every trace of a cluster"))
    command("list", _list, "names of the clusters that run")
    _name(command("env", _env, "print `export` lines for a shell"))
    command("build", _build, "build the programs into the cache").add_argument("set", nargs="?", default="core")
    prepare = command("prepare", _prepare, "fetch what clusters and their tests take from Debian, into the cache")
    prepare.add_argument("--if-usable", action="store_true", help="say why and do nothing where no cluster can run")
    _name(command("images", _images, "make the Debian python image and import it"))
    load = command("load", _load, "import image archives into every node")
    _name(load)
    load.add_argument("archive", nargs="+", type=Path, help="a file of `make images` or `docker save`")
    fault = command("fault", _fault, "break a cluster, or mend it")
    _name(fault)
    fault.add_argument("verb", choices=sorted(_VERBS), help="; ".join(f"{verb} {use}" for verb, use in _VERBS.items()))
    fault.add_argument("where", nargs="*", help="nodes, `hub`, or a part of the control plane")
    fault.add_argument("--rate-kbit", type=int, default=1000, help="for slow")
    fault.add_argument("--delay-ms", type=int, default=0, help="for slow; needs netem")
    proxy = command("proxy", _proxy, "run a misbehaving proxy in front of the API server until interrupted")
    _name(proxy)
    proxy.add_argument("--path", default=".*", help="regular expression for the path")
    proxy.add_argument("--method", help="GET, POST, ...")
    proxy.add_argument("--watch", action="store_true", help="watches only")
    proxy.add_argument("--times", type=int, help="act so often, then pass everything on")
    proxy.add_argument("--answer", type=int, metavar="STATUS", help="410, 429, 500, ...")
    proxy.add_argument("--delay-s", type=float, help="pass on after a while")
    proxy.add_argument("--cut-watch-s", type=float, help="end watches after a while")
    proxy.add_argument("--drop", action="store_true", help="close the connection")
    reap = command("reap", _reap, "internal: take a cluster down when its owner ends")
    _name(reap)
    reap.add_argument("--owner-pid", type=int, required=True)
    reap.add_argument("--owner-started", type=int, required=True)
    return parser


def _name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="dev", help="which cluster (default dev)")


def _up(arguments: argparse.Namespace) -> None:
    options = Options(
        nodes=arguments.nodes,
        kwok_nodes=arguments.kwok_nodes,
        gang_scheduling=arguments.gang_scheduling,
        feature_gates=tuple(arguments.feature_gate),
        runtime_config=tuple(arguments.runtime_config),
        extended_resources=tuple(arguments.resource),
        dra_devices=arguments.dra_devices,
        node_disk_gib=arguments.node_disk_gib,
        node_monitor_grace_period_s=arguments.node_grace_s,
        network_policies=arguments.network_policies,
        prometheus=arguments.prometheus,
        kueue="kueue" in arguments.others,
        jobset="jobset" in arguments.others,
        gangs=tuple(name for name in gangs.ALL if name in arguments.others),
        audit=arguments.audit,
    )
    cluster = Cluster.up(arguments.name, options, report=say)
    print(cluster.kubeconfig)


def _down(arguments: argparse.Namespace) -> None:
    gone = Cluster.down(arguments.name)
    say(f"{arguments.name} is down" if gone else f"{arguments.name} was not there")


def _list(_: argparse.Namespace) -> None:
    running = Cluster.running()
    for name in running:
        print(name)
    for name in sorted(set(state.names()) - set(running)):
        if state.is_elsewhere(name):
            say(
                f"{name} has processes and no folder in {state.root()}: it was started with another "
                f"RLINF_TESTCLUSTER_STATE, or its folder was lost; `down --name {name}` ends it even if it is in use"
            )
        else:
            say(f"{name} does not run, or not yet; `down --name {name}` removes what is left of it")


def _env(arguments: argparse.Namespace) -> None:
    cluster = Cluster.attach(arguments.name)
    print(f"export KUBECONFIG={cluster.kubeconfig}\nexport PATH={cluster.programs}:$PATH")


def _build(arguments: argparse.Namespace) -> int:
    return binaries.main([arguments.set])


def _prepare(arguments: argparse.Namespace) -> int:
    """Before tests, which see neither a proxy's variables nor have the time."""
    try:
        requirements.check()
        requirements.ensure(requirements.FOR_A_CLUSTER, report=say)
    except MissingRequirement as err:
        if not arguments.if_usable:
            raise
        say(f"nothing is prepared, as cluster tests cannot run here: {err}")
        return 1 if binaries.must_be_whole() else 0
    fetches: list[tuple[Callable[..., object], str]] = [
        (images.python_base, "without Debian's python image the tests that run our own code in pods fail"),
        (prometheus.programs, "without Prometheus the tests of its figures fail"),
    ]
    for fetch, costs in fetches:
        try:
            fetch(report=say)
        except ClusterError as err:
            if not arguments.if_usable or binaries.must_be_whole():
                raise
            say(f"{costs}: {err}")
    return 0


def _images(arguments: argparse.Namespace) -> None:
    print(Cluster.attach(arguments.name).load_python_base(report=say))


def _load(arguments: argparse.Namespace) -> None:
    if missing := [path for path in arguments.archive if not path.is_file()]:
        raise ClusterError(f"no image archive {missing[0]}; `make images` writes them to build/images")
    Cluster.attach(arguments.name).load(*arguments.archive)


_VERBS = {
    "lose-contact": "NODE",
    "crash": "NODE",
    "revive": "NODE",
    "cut": "NODE NODE|hub",
    "slow": "NODE NODE",
    "heal-network": "",
    "pause": "PART",
    "resume": "PART",
    "restart": "PART",
    "stop": "PART",
    "fill-disk": "NODE",
    "free-disk": "NODE",
    "undo-all": "",
}


def _fault(arguments: argparse.Namespace) -> None:
    wanted = len(_VERBS[arguments.verb].split())
    if len(arguments.where) != wanted:
        raise ClusterError(
            f"fault {arguments.verb} wants {wanted} names ({_VERBS[arguments.verb] or 'none'}), and got "
            f"{len(arguments.where)}"
        )
    verb = getattr(Cluster.attach(arguments.name).faults, arguments.verb.replace("-", "_"))
    if arguments.verb == "slow":
        verb(*arguments.where, rate_kbit=arguments.rate_kbit, delay_ms=arguments.delay_ms)
    else:
        verb(*arguments.where)


def _proxy(arguments: argparse.Namespace) -> None:
    from tools.testcluster import apiproxy  # aiohttp, which nothing else here needs

    actions: list[apiproxy.Action] = []
    if arguments.answer is not None:
        actions.append(apiproxy.Answer(status=arguments.answer))
    if arguments.delay_s is not None:
        actions.append(apiproxy.Delay(delay_s=arguments.delay_s))
    if arguments.cut_watch_s is not None:
        actions.append(apiproxy.CutWatch(after_s=arguments.cut_watch_s))
    if arguments.drop:
        actions.append(apiproxy.Drop())
    if len(actions) > 1:
        raise ClusterError("one of --answer, --delay-s, --cut-watch-s and --drop at a time")
    # Before the proxy's thread begins, which inherits it: unblocked, a signal would leave the kubeconfig behind.
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with apiproxy.ApiProxy(Cluster.attach(arguments.name)) as proxy:
        for action in actions:
            proxy.add(
                apiproxy.Rule(
                    do=action,
                    path=arguments.path,
                    method=arguments.method,
                    watch=True if arguments.watch else None,
                    times=arguments.times,
                )
            )
        say(f"{proxy.server} misbehaves until interrupted")
        print(proxy.kubeconfig, flush=True)
        signal.sigwait(ends)


def _reap(arguments: argparse.Namespace) -> None:
    owner = Process(name=reaper.OWNER, pid=arguments.owner_pid, started_ticks=arguments.owner_started)
    reaper.follow(Paths.of(arguments.name), owner, down=Cluster.down)


if __name__ == "__main__":
    sys.exit(main())
