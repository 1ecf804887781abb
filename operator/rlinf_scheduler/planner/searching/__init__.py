"""What `plan` is made of: how candidates are drawn, changed, weighed and run."""
