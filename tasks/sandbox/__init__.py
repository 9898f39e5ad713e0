"""Isolated execution of model-written code."""

from functools import partial

from objectives.config.aliases import renamed_attribute

__getattr__ = partial(renamed_attribute, __name__)  # names of the module `tasks.sandbox` of release 0.1
