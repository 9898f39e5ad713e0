"""Objectives that the service computes itself, in one pass over a batch."""

from functools import partial

from objectives.config.aliases import renamed_attribute

__getattr__ = partial(renamed_attribute, __name__)  # names of the module that this package replaced
