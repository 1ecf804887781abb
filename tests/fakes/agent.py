"""`python -m tests.fakes.agent`: the real agent, through the real door, whose workers are `tests.fakes.worker`."""

import functools
import sys

from rlinf_worker import __main__ as door
from rlinf_worker.agent import main

if __name__ == "__main__":
    door.RUN["agent"] = functools.partial(main.run, command=(sys.executable, "-m", "tests.fakes.worker"))
    sys.exit(door.main(["agent"]))
