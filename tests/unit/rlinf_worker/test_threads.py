import threading
from unittest.mock import Mock

from rlinf_worker.threads import in_a_thread


def test_a_call_in_a_thread_cannot_be_cancelled_and_says_how_it_ended():
    assert in_a_thread(lambda: 3, name="x").result(timeout=10) == 3
    may_end = threading.Event()
    waiting = in_a_thread(lambda: may_end.wait(10), name="x")
    assert not waiting.cancel()
    may_end.set()
    assert waiting.result(timeout=10) is True
    failed = in_a_thread(Mock(side_effect=SystemExit(3)), name="x")
    assert isinstance(failed.exception(timeout=10), SystemExit)


def test_nobody_who_ends_waits_for_it():
    seen = in_a_thread(threading.current_thread, name="of a test").result(timeout=10)
    assert (seen.daemon, seen.name) == (True, "of a test")
