"""Mutants: small mistakes, a seeded sample, each put into a copy of the tree; and the unit tests that should see it."""
