"""The command line of a person: validate, run, watch."""
