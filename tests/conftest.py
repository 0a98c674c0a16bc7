"""Settings that all tests share."""

from hypothesis import HealthCheck, settings

# A busy machine is no failure: nothing here asserts wall-clock time.
settings.register_profile("scout", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("scout")
