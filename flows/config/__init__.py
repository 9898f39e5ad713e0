"""Configs of every flow, and how they are read from files and overrides."""

from functools import partial

from objectives.config.aliases import renamed_attribute

__getattr__ = partial(renamed_attribute, __name__)  # names of the module that this package replaced
