"""Checkpoints of a job: layout, reading, writing."""
