"""Conversion between the Tinker protocol's bytes and the engine's types."""
