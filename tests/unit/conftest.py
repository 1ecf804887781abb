"""What every property here runs under: no clock, as a busy machine makes an example slow, which is no finding; and the
same examples each time, as a check of one tree has one answer. What looks further says so: `make deep-channels`.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.load_profile("no clock")
