"""Preference pairs, judges and preference models."""
