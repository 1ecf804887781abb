"""Readiness probes: exec, httpGet, tcpSocket, with a kubelet's counting.

For: `containers.py`, one task per running container that has a probe. Not for: liveness and start-up probes (podspec.py
refuses them).

| concurrent part | waits for | unblocked by |
|---|---|---|
| watch_readiness | period; then one probe | the clock; the answer or timeoutSeconds; cancelled with the container |
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from rljob.local.objects import Manifest
from rljob.local.processes import ContainerProcess


async def watch_readiness(
    container: Manifest,
    *,
    address: str,
    process: ContainerProcess,
    argv: list[str],
    report: Callable[[bool, str], None],
) -> None:
    """Calls report(ready, why) on each change; `argv` is the exec probe's command with its paths translated."""
    probe = container["readinessProbe"]
    period_s, timeout_s = float(probe.get("periodSeconds", 10)), float(probe.get("timeoutSeconds", 1))
    needed = {True: int(probe.get("successThreshold", 1)), False: int(probe.get("failureThreshold", 3))}
    ready, streak, last = False, 0, False
    await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
    while True:
        why = await _once(container, address=address, process=process, argv=argv, timeout_s=timeout_s)
        ok = not why
        streak = streak + 1 if ok == last else 1
        last = ok
        if ok != ready and streak >= needed[ok]:
            ready = ok
            report(ready, why)
        await asyncio.sleep(period_s)


async def _once(
    container: Manifest, *, address: str, process: ContainerProcess, argv: list[str], timeout_s: float
) -> str:
    """Empty: it answered as it should."""
    probe = container["readinessProbe"]
    if "exec" in probe:
        code, message = await process.run_in(argv, timeout_s=timeout_s)
        return "" if code == 0 else message or f"command exited with {code}"
    try:
        async with asyncio.timeout(timeout_s):
            if "tcpSocket" in probe:
                tcp = probe["tcpSocket"]
                _, writer = await asyncio.open_connection(tcp.get("host", address), _port(tcp["port"], container))
                writer.close()
                return ""
            return await _http(probe["httpGet"], container=container, address=address)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as err:
        return f"probe of {address}: {str(err) or type(err).__name__}"


async def _http(get: Manifest, *, container: Manifest, address: str) -> str:
    context = None
    if get.get("scheme", "HTTP") == "HTTPS":
        context = ssl.create_default_context()  # a kubelet does not verify either: it knows no name of a pod
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = get.get("host", address), _port(get["port"], container)
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        headers = {"Host": f"{host}:{port}", "User-Agent": "kube-probe/1.36", "Connection": "close"}
        headers |= {header["name"]: header["value"] for header in get.get("httpHeaders") or []}
        lines = [f"GET {get.get('path') or '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        words = (await reader.readline()).split()
    finally:
        writer.close()
    code = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return "" if 200 <= code < 400 else f"HTTP probe failed with statuscode: {code}"


def _port(port: int | str, container: Manifest) -> int:
    if isinstance(port, int):
        return port
    return int(next(p["containerPort"] for p in container.get("ports") or [] if p.get("name") == port))
