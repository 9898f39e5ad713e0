"""Regularizers that compare the datums of a batch."""
