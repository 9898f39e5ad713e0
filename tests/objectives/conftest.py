"""Hypothesis for this room: no deadline, since a shared machine's pauses are not a property of the code."""

from hypothesis import settings

settings.register_profile("objectives", deadline=None, max_examples=50)
settings.load_profile("objectives")
