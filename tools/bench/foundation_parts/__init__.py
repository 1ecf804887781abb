"""What `make bench-foundation` runs in processes of their own: a flow with two roles, and the reference."""
