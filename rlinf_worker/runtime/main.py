"""`python -m rlinf_worker worker`: the process of one worker, started by its agent. Exit codes are `names.EXIT_*`.

Imports of a role's libraries come after the agent has heard from us: they take seconds, and a start that is seen to be
under way is not taken for a hang.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Callable, Mapping

from rlinf_api import names, rpc
from rlinf_api.errors import UserError
from rlinf_worker import logs
from rlinf_worker import settings as all_settings
from rlinf_worker.links.certificates import LinkCertificates
from rlinf_worker.links.settings import BULK_WAYS, GPU_WAYS, LinkSettings
from rlinf_worker.roles import registry
from rlinf_worker.roles.protocol import Role
from rlinf_worker.runtime import identity as identities
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.spare import Spare, flow_of
from rlinf_worker.runtime.worker import Worker
from rlinf_worker.settings import Settings
from rlinf_worker.uplink.dialling import RefusedByDriver, to_driver


def run() -> int:
    """The exit code; raises what `__main__` turns into a sentence and a code."""
    identity = identities.read(os.environ)
    try:
        return asyncio.run(_run(identity, all_settings.load(os.environ)))
    except RefusedByDriver as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


async def _run(identity: WorkerIdentity, settings: Settings) -> int:
    tls = rpc.TlsFolder(identity.tls_dir)
    dial_driver = to_driver(identity.driver_address, tls=tls, job_uid=identity.job_uid)
    kind, loop = identity.kind, asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the terminal's Ctrl-C is the agent's to pass on

    def make_role() -> Role:
        return registry.make(kind)

    spare: Spare | None = None
    if flow := os.environ.get(names.ENV_WORKER_SPARE, ""):
        spare = Spare(identity, settings=settings, make_role=make_role, flow=flow_of(flow))
        on_term = functools.partial(spare.stop, "SIGTERM", exit_code=names.EXIT_TERMINATED)
        loop.add_signal_handler(signal.SIGTERM, on_term)
        place = await _place_of(spare)
        if place is None:
            return spare.exit_code
        identity, make_role = place

    worker = Worker(
        identity,
        settings=settings,
        make_role=make_role,
        dial_driver=dial_driver,
        certificates=LinkCertificates(tls),
        link_settings=link_settings(os.environ),
    )
    loop.add_signal_handler(signal.SIGTERM, lambda: worker.stop("SIGTERM", exit_code=names.EXIT_TERMINATED))
    try:
        return await worker.run()
    finally:
        if spare is not None:
            await spare.left()


async def _place_of(spare: Spare) -> tuple[WorkerIdentity, Callable[[], Role]] | None:
    """Whose place it takes; None where it has been told to end instead."""
    place = None
    try:
        place = await spare.run()
    finally:
        if place is None:
            await spare.left()
    if place is not None:
        logs.configure("worker", os.environ)  # whose lines these are now
    return place


def link_settings(environ: Mapping[str, str]) -> LinkSettings:
    """By RLINF_LINK_BULK and RLINF_LINK_GPU. Raises UserError for a word that it does not know."""
    found, known = {}, LinkSettings()
    for name, field, words in ((names.ENV_LINK_BULK, "bulk", BULK_WAYS), (names.ENV_LINK_GPU, "gpu", GPU_WAYS)):
        found[field] = environ.get(name) or getattr(known, field)
        if found[field] not in words:
            raise UserError(
                f"{name} cannot be used", got=repr(found[field]), wanted=" or ".join(words),
                next="correct it in the pools' templates",
            )  # fmt: skip
    return LinkSettings(bulk=found["bulk"], gpu=found["gpu"])
