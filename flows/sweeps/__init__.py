"""Sweeps: points, trials, backends and results."""
