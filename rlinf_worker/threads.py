"""A call in a thread of its own, which ends with the process: nobody who has to end waits for an import or a disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Made = TypeVar("Made")


def in_a_thread(make: Callable[[], Made], *, name: str) -> Future[Made]:
    """A daemon, which asyncio's own threads are not. For what takes seconds in which agent and driver must go on
    hearing from us.

    role = await asyncio.wrap_future(in_a_thread(make_role, name="import of the role"))
    """
    made: Future[Made] = Future()
    made.set_running_or_notify_cancel()  # from now on nobody can cancel it: the thread will set it

    def work() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # noqa: BLE001  raised by whoever waits for it
            made.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return made
