"""Turns: which role holds a lease set. `rule.py` decides, `arbiter.py` gives it time, `worker.py` obeys."""
