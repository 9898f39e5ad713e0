"""Places where the trials of a sweep run."""
