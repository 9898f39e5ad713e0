"""Estimates of the methods that sample, of several stages, and of evaluations."""
