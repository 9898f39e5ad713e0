"""Benchmarks; `python -m benchmarks` lists and runs them."""
