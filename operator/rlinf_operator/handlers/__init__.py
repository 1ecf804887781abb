"""What comes in from outside: Kopf's events, and the requests of probes and Prometheus. Doors, not rooms."""
