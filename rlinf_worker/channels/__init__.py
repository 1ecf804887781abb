"""Channels between roles: what they promise, what the ends of all of them share, and the rules of streams."""
