"""What the rows of `make bench-reasoning` are made of: jobs, an engine alone, and TRL."""
