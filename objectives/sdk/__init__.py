"""Objectives in a custom training loop on the Tinker SDK."""

from functools import partial

from objectives.config.aliases import renamed_attribute

__getattr__ = partial(renamed_attribute, __name__)  # names of the module that this package replaced
