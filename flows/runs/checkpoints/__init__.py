"""Checkpoints of a run: saved, named, promoted, and approved by a person."""
