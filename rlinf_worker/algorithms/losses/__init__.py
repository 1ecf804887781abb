"""Losses: one file each, a function `(MicroBatch, LossConfig) -> LossOut` that returns unnormalised sums."""
