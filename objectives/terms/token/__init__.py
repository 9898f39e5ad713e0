"""Regularizers on the logprobs of single tokens."""
