"""`make chaos`: random faults over a job that learns CartPole, and a verdict on what came of it.

| file | has |
|---|---|
| `job.py` | one `rljob run` in name spaces of its own: its processes, what it writes |
| `plans.py` | plans changed by hand meanwhile, and what came of it |
| `faults.py` | the kinds of faults, and how each is done and undone |
| `rounds.py` | a round: faults until the job ends; when each of them was recovered from |
| `verdict.py` | what must hold afterwards |
| `__main__.py` | the command, the table, the JSON |
"""
