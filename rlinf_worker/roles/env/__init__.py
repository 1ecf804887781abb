"""The `env` role: steps slices of vectorised environments and assembles their trajectories."""
