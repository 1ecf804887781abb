"""`make learn`: does the CartPole example learn? Several seeds, one after the other, and a verdict against the bar.

    make learn                     5 seeds
    make learn ARGS="--seeds 20"

For: whoever changes hyper-parameters, the flow or a role of it. Not for: speed (`make bench-foundation`).
"""

from __future__ import annotations

import argparse
import statistics
import sys

from tools.bench.foundation_parts import runs
from tools.bench.harness import BenchError

BAR = 100_000.0
"""Environment steps within which the mean of the last 100 training episodes reaches 475."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make learn", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds 1 to N (default 5)")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds: got {options.seeds}, wanted 1 or more")
    solved = []
    for seed in range(1, options.seeds + 1):
        try:
            with runs.run(runs.CARTPOLE, "--seed", str(seed)) as run:
                solved.append(run.solved_at)
                rate, final = run.answer["env_steps_per_s"], run.answer.get("return_mean", 0.0)
        except BenchError as error:
            print(f"learn: seed {seed}: {error}", file=sys.stderr)
            return 2
        when = f"after {solved[-1]:.0f} env steps" if solved[-1] < runs.NEVER else "never"
        print(f"learn: seed {seed}: return 475 {when}; {final:.1f} at the end, {rate:.0f} env steps/s", flush=True)
    late = sum(value > BAR for value in solved)
    within = f"{len(solved) - late} of {len(solved)} seeds within {BAR:.0f} env steps"
    spread = f"median {statistics.median(solved):.0f}, slowest {max(solved):.0f}"
    print(f"learn: {'missed' if late else 'met'}: {within}; {spread}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
