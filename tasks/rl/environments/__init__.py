"""Environments that ship with the project."""
