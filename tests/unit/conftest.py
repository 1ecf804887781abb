"""What every property here runs under: no clock. A busy machine makes an example slow, and that is no finding."""

from hypothesis import HealthCheck, settings

settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")
