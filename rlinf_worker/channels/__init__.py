"""Channels between roles: protocol, pure cores of both modes, rounds, lineage."""
