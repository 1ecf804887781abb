"""What workers count becomes metrics of the pod that never fall, however often a worker dies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from rlinf_worker.agent.metrics import AgentMetrics, Series, WorkerCounters

ITEMS = "rlinf_channel_items_total"


def series(name, **labels):
    return Series(name, (("role", "env"), ("worker", "env/0"), *labels.items()))


def test_a_new_attempt_begins_at_zero_and_the_sum_goes_on():
    counters = WorkerCounters(limit=10)
    counters.report("env/0", 1, values=[(ITEMS, ("channel=a",), 5.0)])
    counters.report("env/0", 1, values=[(ITEMS, ("channel=a",), 7.0)])
    counters.report("env/0", 2, values=[(ITEMS, ("channel=a",), 1.0)])
    assert counters.totals() == {series(ITEMS, channel="a"): 8.0}


def test_a_level_dies_with_its_attempt():
    counters = WorkerCounters(limit=10)
    counters.report("env/0", 1, values=[("rlinf_channel_depth", (), 5.0)])
    counters.report("env/0", 1, values=[("rlinf_channel_depth", (), 3.0)])
    assert counters.totals() == {series("rlinf_channel_depth"): 3.0}
    counters.report("env/0", 2, values=[])
    assert counters.totals() == {}


def test_what_the_agent_counts_itself_adds_up_over_attempts():
    counters, name = WorkerCounters(limit=10), "rlinf_worker_exits_total"
    counters.add("env/0", 1, name=name, labels=("reason=Killed",))
    counters.add("env/0", 2, name=name, labels=("reason=Killed",), value=2.0)
    assert counters.totals() == {series(name, reason="Killed"): 3.0}


def test_what_is_not_ours_or_too_much_is_dropped_and_counted():
    counters = WorkerCounters(limit=2)
    bad = [("up", (), 1.0), (ITEMS, ("no equals",), 1.0), (ITEMS, ("a=" + "x" * 200,), 1.0), (ITEMS, ("role=me",), 1.0)]
    counters.report("env/0", 1, values=[*bad, *((ITEMS, (f"channel={i}",), 1.0) for i in range(5))])
    assert len(counters.totals()) == 2
    assert counters.dropped == 7


@pytest.mark.parametrize(
    ("name", "label", "taken"),
    [
        (ITEMS, "channel=" + "x" * 100, True),
        (ITEMS, "channel=" + "x" * 101, False),
        (ITEMS, "channel=", True),
        (ITEMS, "a=b=c", True),
        (ITEMS, "channel", False),
        (ITEMS, "=b", False),
        (ITEMS, "Channel=b", False),
        (ITEMS, "worker=env/1", False),
        ("rlinf_", "a=b", False),
        ("rlinf_" + "x" * 80, "a=b", True),
        ("rlinf_" + "x" * 81, "a=b", False),
        ("go_gc_total", "a=b", False),
    ],
)
def test_which_series_of_a_worker_are_taken(name, label, taken):
    """Else a role could fill the memory of whoever collects them."""
    counters = WorkerCounters(limit=10)
    counters.report("env/0", 1, values=[(name, (label,), 1.0)])
    counters.add("env/0", 1, name=name, labels=(label,), value=2.0)
    assert (list(counters.totals().values()), counters.dropped) == (([3.0], 0) if taken else ([], 2))


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 1e6)), max_size=30))
def test_a_total_never_falls(reports):
    counters, attempt, before = WorkerCounters(limit=10), 0, 0.0
    for jump, value in reports:
        attempt = max(attempt, jump)
        counters.report("env/0", attempt, values=[(ITEMS, (), value)])
        now = counters.totals()[series(ITEMS)]
        assert now >= before
        before = now


def test_prometheus_reads_series_of_one_name_with_different_labels():
    counters = WorkerCounters(limit=10)
    counters.report("env/0", 1, values=[(ITEMS, ("channel=a",), 5.0), (ITEMS, (), 1.0)])
    text = generate_latest(AgentMetrics(counters, lambda: {"rlinf_agent_slots": ("Slots", 4.0)}).registry).decode()
    assert text.count("# TYPE rlinf_channel_items_total counter") == 1
    assert 'rlinf_channel_items_total{channel="a",role="env",worker="env/0"} 5.0' in text
    assert "rlinf_agent_slots 4.0" in text
