"""Cycles: one role asks, another answers; a numbered conversation per pair of lives, opened by the asker."""
