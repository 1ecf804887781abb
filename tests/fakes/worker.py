"""`python -m tests.fakes.worker`: a worker without a role, which behaves as its config says. Joins over Slots.

config: {"do": "work" | "silent" | "fail" | "raise" | "nothing", "deaf": true, "children": true, "shout_bytes": n,
         "deadline_s": s, "exit_code": n, "stuck": true}
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import grpc.aio

from rlinf_api import names
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2, slots_pb2_grpc
from rlinf_worker.agent import leash

# One that left its group and session, and whose parent has exited and been waited for: nothing else is left of it.
DAEMON = (
    "import os, time\nif child := os.fork(): os._exit(os.waitpid(child, 0)[1])\n"
    "os.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(600)"
)


def begin() -> dict[str, Any]:
    with open(os.environ[names.ENV_WORKER_CONFIG], encoding="utf-8") as file:
        config: dict[str, Any] = json.load(file)
    if config.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if config.get("children"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        subprocess.run([sys.executable, "-c", DAEMON], check=True)
    if config.get("do") == "nothing":
        time.sleep(600)
    if config.get("do") == "raise":
        raise ValueError(config.get("message", "the simulator has no floor"))
    for _ in range(config.get("shout_bytes", 0) // 100):
        sys.stdout.write("y" * 99 + "\n")
    sys.stdout.flush()
    sys.stderr.write("loaded\n")
    return config


async def main(config: dict[str, Any]) -> int:
    do = config.get("do", "work")
    worker, attempt = os.environ[names.ENV_WORKER_ID], int(os.environ[names.ENV_WORKER_ATTEMPT])
    deadline_s = config.get("deadline_s", 5.0)
    async with grpc.aio.insecure_channel(f"unix:{os.environ[names.ENV_SLOTS_SOCKET]}") as channel:
        call = slots_pb2_grpc.SlotsStub(channel).Join()
        report = slots_pb2.WorkerReport
        await call.write(report(hello=slots_pb2.Hello(worker=worker, attempt=attempt, pid=os.getpid())))
        step = slots_pb2.Progress(phase="step", deadline_s=deadline_s)
        now = time.time()
        spans = [slots_pb2.Span(slot="0", role="env", kind="compute", step=1, t0=now - 2.0, t1=now)]
        await call.write(report(spans=slots_pb2.Spans(spans=spans)))
        items = slots_pb2.Counter(name="rlinf_channel_items_total", labels=["channel=samples"], value=7 * attempt)
        await call.write(report(counters=slots_pb2.Counters(counters=[items])))
        await call.write(report(progress=step))  # last: who sees this mark knows that the agent has all the rest
        if do == "fail":
            words = slots_pb2.LastWords(reason="EnvironmentBroken", message="the robot fell over", exit_code=75)
            await call.write(report(last_words=words))
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:  # the agent has read all
                pass
            return int(config.get("exit_code", 3))
        if do == "silent":
            time.sleep(600)  # noqa: ASYNC251  that is the point

        writing = asyncio.Lock()  # a stream takes one write at a time

        async def write(said: slots_pb2.WorkerReport) -> None:
            async with writing:
                await call.write(said)

        async def work() -> None:
            while True:
                await write(report(progress=step))
                await asyncio.sleep(0.1)

        working = asyncio.create_task(work())
        turn = slots_pb2.TurnReport(ripe=True, memory_bytes=5)
        while True:
            order = await call.read()
            if not isinstance(order, slots_pb2.AgentOrder):
                return 1
            match order.WhichOneof("kind"):
                case "stop" if not config.get("deaf"):
                    working.cancel()
                    return 0
                case "promote":
                    working.cancel()
                    sys.stderr.write("promoted\n")
                    os.environ[names.ENV_WORKER_ID] = order.promote.worker
                    os.environ[names.ENV_WORKER_ATTEMPT] = str(order.promote.attempt)
                    return await main(json.loads(order.promote.config_json))
                case "membership" if order.membership.lease_set:
                    turn.lease_set, turn.standing = order.membership.lease_set, "wants"
                    await write(report(turn=turn))
                case "turn":  # what an order asks for is so at once
                    turn.seen = order.turn.number
                    stands = {"offload": "content", "leave": "content", "finish": "idle", "yield": "idle"}
                    turn.standing = stands.get(order.turn.kind, "holds")
                    if not config.get("stuck"):
                        await write(report(turn=turn))


if __name__ == "__main__":
    leash.put_on(os.environ)
    sys.exit(asyncio.run(main(begin())))
