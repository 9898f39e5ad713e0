"""Hypothesis settings: no deadline, because the speed of a shared machine varies."""

from hypothesis import settings

settings.register_profile("objectives", deadline=None, max_examples=50)
settings.load_profile("objectives")
