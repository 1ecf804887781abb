"""GET /healthz, /readyz and /metrics over HTTP, in the operator's event loop: a loop that hangs answers nobody.

| path | 200 while | otherwise |
|---|---|---|
| /readyz | every check passes; a replica that waits for the Lease is ready | 503, a line per check that fails |
| /healthz | the same with twice the patience, so that a restart is the last resort | 503, the same |
| /metrics | always | |

    probes = Probes(metrics)
    probes.checks["watch of Pod"] = lambda: (store.age_s()["Pod"], process.watch_stale_s)     # (age, limit)
    await probes.start(host="0.0.0.0", port=8080)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rlinf_api.errors import UserError
from rlinf_operator.metrics import Metrics

PATIENCE: Final = 2.0
Check = Callable[[], tuple[float, float]]


class Probes:
    def __init__(self, metrics: Metrics) -> None:
        self.checks: dict[str, Check] = {}
        self.before_scrape: Callable[[], None] = lambda: None
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    def failing(self, *, patience: float = 1.0) -> list[str]:
        """Sentences: 'watch of Pod: 312 s, wanted at most 240 s'."""
        found = []
        for name, check in self.checks.items():
            age_s, limit_s = check()
            if age_s > limit_s * patience:
                found.append(f"{name}: {age_s:.0f} s, wanted at most {limit_s * patience:.0f} s")
        return found

    async def start(self, *, host: str, port: int) -> int:
        """The port, which port 0 leaves to the system."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._scrape)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(
                f"probes and metrics cannot listen on {host}:{port}", got=str(error), wanted="a free port",
                next="set RLINF_OPERATOR_HTTP_PORT",
            ) from error  # fmt: skip
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return _answer(self.failing(patience=PATIENCE))

    async def _readyz(self, _: web.Request) -> web.Response:
        return _answer(self.failing())

    async def _scrape(self, _: web.Request) -> web.Response:
        self.before_scrape()
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _answer(failing: list[str]) -> web.Response:
    return web.Response(text="\n".join(failing) + "\n", status=503) if failing else web.Response(text="ok\n")
