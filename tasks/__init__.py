"""Prefect tasks, grouped by capability."""

from objectives.aliases import install

install()
