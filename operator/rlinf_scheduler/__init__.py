"""The scheduler: writes the RLPlans that drivers execute."""
