"""The data plane: driver, agents and the roles they run."""
