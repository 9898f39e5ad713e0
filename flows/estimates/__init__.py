"""Estimates of the steps, tokens, cost and time of runs and evaluations before they start."""
