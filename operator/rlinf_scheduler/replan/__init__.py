"""Whether a running job gets another plan: what was measured of it, fitted; what follows from it, decided. Pure."""
