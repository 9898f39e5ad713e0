"""Internals of other libraries that the tasks use, one module per library."""
