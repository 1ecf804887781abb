"""What recording spans takes of a step, as the program itself counts it: CPU seconds of the recorders in all workers
and of the agents, who write what they are sent. The job is CartPole as committed: short steps, many spans.

    spans_cost          the worker that spends most of its step time so, and its part of what the agents spend
    spans_cost_agents   all agents together, of the steps' time: of one core, beside the workers

`rljob timeline`, which makes the picture, is run by a person when the job is over, and is in neither.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob import timeline
from tools.bench.foundation_parts import runs
from tools.bench.harness import BenchError, Row

BAR_PERCENT = 1.0


def cost() -> Mapping[str, float]:
    with runs.run(runs.CARTPOLE) as run:
        return shares(timeline.read(run.folder))


def shares(record: timeline.Record) -> Mapping[str, float]:
    """Percent. The agents' seconds are of the whole run, the workers' of the steps but the last: a bit too much."""
    if not record.accounted_s or not record.instrument_s or not record.agent_instrument_s:
        raise BenchError(
            f"{len(record.instrument_s)} workers have told what recording took them in {record.accounted_s:.1f} s of "
            f"steps, agents {record.agent_instrument_s} s: that is no measurement"
        )
    per_s = 100 / record.accounted_s
    agents = record.agent_instrument_s / len(record.instrument_s)
    return {
        "spans_cost": per_s * (max(record.instrument_s.values()) + agents),
        "spans_cost_agents": per_s * record.agent_instrument_s,
    }


def rows() -> list[Row]:
    return [
        Row(name="spans_cost", unit="% of step time", better="lower", bar=BAR_PERCENT, subject=cost),
        Row(name="spans_cost_agents", unit="% of step time", better="lower", subject=cost),
    ]
