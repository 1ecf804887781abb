"""Queues: the core that the driver matches units with consumers by, and the two ends of a queue in a worker."""
