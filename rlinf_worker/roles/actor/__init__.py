"""The actor role: learns from trajectories, publishes weights, commits steps."""
