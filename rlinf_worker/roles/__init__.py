"""Roles: what a worker does. One folder each, with the loop in `role.py` and its parts beside it."""
