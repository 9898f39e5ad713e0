"""Weights of terms over a run: schedules, targets, and the scale of a batch."""
