"""Channels between roles: what they promise, and what the ends of all of them share."""
