"""Hypothesis judges what it finds, not how long a busy machine takes to make it up."""

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
