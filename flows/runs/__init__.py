"""Lifecycle of a run: start, resources, checkpoints, retries, result."""
