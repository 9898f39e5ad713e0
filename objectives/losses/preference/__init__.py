"""Losses on preference pairs."""
