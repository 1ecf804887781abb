"""`python -m rlinf_operator`: the operator as a process. Two or more run; one leads, the others wait for its Lease.

    environment   RLINF_OPERATOR_<FIELD> for each field of process.py and settings.py; flags --<field> go before it
    ports         http_port: /healthz /readyz /metrics
    objects       in its own namespace: Lease rlinf-operator, Secret rlinf-operator-ca, Secret rlinf-scheduler-tls
    rights        access.py
    writes        a folder under TMPDIR with its own certificate; nothing else, so the root may be read-only
    exit status   0 after SIGTERM or SIGINT, within stop_timeout_s; 1 when the Lease was lost or a part broke (it is
                  started again, as a follower); 2 for settings that cannot be used

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| main | - | won, ended, stop, Kopf's end | the Lease, signals, Kopf |
| leader election | the Lease | clients/lease.py | |
| leader (leading.py) and what it starts | its table | | cancel by main |
| probes | HTTP requests | | |

Who leads lists everything only after it has the Lease: so nothing that the leader before it wrote can be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any, Final

from rlinf_api import logs
from rlinf_api.errors import RLinfError, UserError
from rlinf_operator import access
from rlinf_operator import process as process_settings
from rlinf_operator.clients import kube, lease
from rlinf_operator.clients.cache import CACHED
from rlinf_operator.handlers.probes import Probes
from rlinf_operator.leading import Leader
from rlinf_operator.metrics import Metrics
from rlinf_operator.process import ProcessSettings
from rlinf_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)
EXIT_STOPPED: Final = 0
EXIT_BROKEN: Final = 1
EXIT_SETTINGS: Final = 2
NOISY: Final = {
    "kopf": logging.WARNING,
    "kopf._core.reactor.running": logging.ERROR,
    # Each call that failed, for ever where a namespace is refused; reflector.py and check.py say it of the same server.
    "kopf._cogs.clients.watching": logging.CRITICAL,
    "aiohttp": logging.WARNING,
}
STANDING_CALLS: Final = 4
"""Connections beside the watches': the Lease's, and lists. Shared with the passes they cost the Lease when a thousand
jobs were made at once: its calls waited in line behind pods for longer than they may."""
KILL_AFTER_S: Final = 1.0
"""How long a process that lost its Lease may still take to end, before it is ended."""


async def serve(process: ProcessSettings, operator: OperatorSettings) -> int:
    if not operator.scheduler_address:
        raise UserError(
            "no scheduler to ask for plans", wanted="host:port of its Service",
            next=f"set {process_settings.PREFIX}SCHEDULER_ADDRESS",
        )  # fmt: skip
    metrics, stop = Metrics(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    probes = Probes(metrics)
    port = await probes.start(host=process.http_host, port=process.http_port)
    logger.info("started", extra={"namespace": process.namespace, "http_port": port})
    try:
        where: Any = {"kubeconfig": process.kubeconfig, "context": process.context}
        watches = len(CACHED) * max(1, len(process_settings.namespaces(process)))
        watches += bool(process.watch_namespace_selector)
        async with (
            await kube.connect(**where) as connection,
            await kube.connect(**where, connections=watches + STANDING_CALLS) as standing,
        ):
            return await _candidate(
                connection, process, standing=standing, operator=operator, metrics=metrics, probes=probes, stop=stop
            )
    finally:
        await probes.stop()


async def _candidate(
    connection: Any,
    process: ProcessSettings,
    *,
    standing: Any,
    operator: OperatorSettings,
    metrics: Metrics,
    probes: Probes,
    stop: asyncio.Event,
) -> int:
    election = lease.Election(
        kube.KubeApi(standing, timeout_s=process.lease_retry_s, metrics=metrics),
        name=access.LEASE,
        namespace=process.namespace,
        identity=process.identity or f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}",
        lease_s=process.lease_s,
        renew_deadline_s=process.lease_renew_deadline_s,
        retry_s=process.lease_retry_s,
    )
    leading: asyncio.Task[None] | None = None
    status = EXIT_STOPPED
    try:
        await lease.first(election.won, stop, election.ended)
        if election.won.is_set() and not stop.is_set():
            metrics.leader.set(1)
            with tempfile.TemporaryDirectory(prefix="rlinf-operator-") as folder:
                leader = Leader(
                    connection, standing=standing, process=process, operator=operator, metrics=metrics, probes=probes,
                    folder=Path(folder),
                )  # fmt: skip
                leading = asyncio.create_task(leader.run(), name="operator: leader")
                over = asyncio.Event()
                leading.add_done_callback(lambda _: over.set())
                await lease.first(stop, election.ended, over)
                if not stop.is_set():
                    status = EXIT_BROKEN
                if election.ended.is_set():
                    asyncio.get_running_loop().call_later(KILL_AFTER_S, os._exit, EXIT_BROKEN)
                await _end(leading, timeout_s=process.stop_timeout_s - 2 * process.lease_retry_s)
        elif not stop.is_set():
            status = EXIT_BROKEN
    finally:
        metrics.leader.set(0)
        await election.release()
    logger.info("stopped", extra={"exit_status": status})
    return status


async def _end(leading: asyncio.Task[None], *, timeout_s: float) -> None:
    """Ends the passes before the Lease is given away: what is under way then would be a second writer."""
    if not leading.done():
        leading.cancel()
        await asyncio.wait([leading], timeout=timeout_s)
    if not leading.done():
        logger.error("the passes did not end", extra={"timeout_s": timeout_s})
        os._exit(EXIT_BROKEN)
    with contextlib.suppress(asyncio.CancelledError):
        if error := leading.exception():
            logger.error("the leader broke", exc_info=error)


def main() -> int:
    process_settings.share_one_heap()
    who: dict[str, object] = {"part": "operator", "replica": os.environ.get("HOSTNAME", "")}
    logs.configure(who, level="INFO")
    try:
        process, operator = process_settings.read(process_settings.parse_flags(sys.argv[1:]), os.environ)
        # Kopf says at INFO what it starts and stops, and once that it leaves signals alone, as it is meant to here.
        logs.configure(
            who,
            level=process.log_level,
            noisy=NOISY,
        )
        return asyncio.run(serve(process, operator))
    except UserError as error:
        logger.error("cannot start", extra={"error": str(error)})
        return EXIT_SETTINGS
    except RLinfError as error:
        logger.error("stopped", extra={"error": str(error)})
        return EXIT_BROKEN


if __name__ == "__main__":
    sys.exit(main())
