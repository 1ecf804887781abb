"""PID 1 of a worker pod: starts, watches and ends workers."""
