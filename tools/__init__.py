"""Tools of the repository: what `make` runs. Nothing here is installed with the distribution."""
