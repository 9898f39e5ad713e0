"""Objectives in configs: specs and their forms, and the lookup of the terms and functions that a config names."""
