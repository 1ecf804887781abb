"""The parts of a driver that others of its parts look at, as one value. Made once by core.py; each knows at most those
above it."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.gang import Gangs
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.turns import DriverTurns
from rlinf_worker.driver.workforce import Workforce


@dataclass(frozen=True, slots=True)
class Parts:
    job: Job
    exchange: Exchange
    workforce: Workforce
    commits: Commits
    gangs: Gangs
    turns: DriverTurns
