"""The reward role: what answers are worth."""
