"""What is told to a driver and outlives a stream: in order, once, bounded."""

from typing import Any

from rlinf_worker.uplink.outbox import Kept, Lasts, Told

SAME, OTHER = True, False


def told(kept, since_hello=(), *, is_same_driver=SAME):
    return [one.message for one in kept.welcomed(since_hello, is_same_driver=is_same_driver)]


def test_what_could_not_be_written_waits_in_order_and_is_said_once():
    kept: Kept[Any] = Kept(limit=10)
    kept.add([Told("first", Lasts.JOB), Told("second", Lasts.DRIVER)])
    kept.add([Told("third", Lasts.JOB)])
    assert told(kept, [Told("while the welcome was on its way")]) == [
        "first", "second", "third", "while the welcome was on its way",
    ]  # fmt: skip
    assert told(kept) == []


def test_what_lasts_as_long_as_its_stream_is_forgotten_with_it():
    kept: Kept[Any] = Kept(limit=10)
    kept.add([Told("the next hello says it", Lasts.STREAM)])
    assert told(kept) == []


def test_what_was_for_one_driver_is_not_said_to_the_next():
    kept: Kept[Any] = Kept(limit=10)
    kept.add([Told("an answer", Lasts.DRIVER), Told("news", Lasts.JOB)])
    since = [Told("another answer", Lasts.DRIVER), Told("a turn", Lasts.STREAM)]
    assert told(kept, since, is_same_driver=OTHER) == ["news", "a turn"]
    assert told(kept) == [], "nor to the one after it"


def test_what_is_repeated_is_the_beginning_of_every_stream_until_it_is_forgotten():
    kept: Kept[Any] = Kept(limit=10)
    kept.repeat("env/0", "exit 1 of env/0")
    kept.repeat("env/1", "exit of env/1")
    kept.repeat("env/0", "exit 2 of env/0")
    since = [Told("exit 2 of env/0", is_repeated=True), Told("a turn")]
    assert told(kept, since) == ["exit of env/1", "exit 2 of env/0", "a turn"], "once, though it was told meanwhile"
    kept.forget("env/1")
    kept.forget("of nobody")
    assert told(kept, is_same_driver=OTHER) == ["exit 2 of env/0"]


def test_it_is_bounded_and_counts_what_it_dropped():
    kept: Kept[Any] = Kept(limit=3)
    for number in range(10):
        kept.add([Told(number, Lasts.JOB)])
        kept.repeat(str(number), -number)
    assert told(kept) == [-7, -8, -9, 7, 8, 9]
    assert kept.dropped == 14
