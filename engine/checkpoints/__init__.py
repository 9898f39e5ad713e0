"""Checkpoints and training runs on disk."""
