"""Example configs, environments, data and scripts."""
