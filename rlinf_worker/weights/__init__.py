"""Policy weights: versions, publish, pull."""
