"""Proofs of the planner: `python -m tools.prove PART`. Each is resumable and says what it found; docs/planner.md."""
