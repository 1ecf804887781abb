"""Roles that take the time of real ones and nothing else: real channels, turns and control, timers for work."""
