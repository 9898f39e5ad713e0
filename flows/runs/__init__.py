"""Lifecycle of a run: open, record, resume, retry, finish."""
