"""Regularizers on the text of a datum."""
