"""Flows, one module per method, and the parts they share."""

from objectives.aliases import install

install()
