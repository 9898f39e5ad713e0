"""Combination and diagnostics of the gradients of terms."""
