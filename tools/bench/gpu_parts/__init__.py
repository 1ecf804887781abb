"""The other process of the benchmark `gpu`."""
