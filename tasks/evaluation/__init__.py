"""Evaluators and the comparison of two policies."""
