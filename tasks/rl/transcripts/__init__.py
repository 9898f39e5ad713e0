"""Rollouts of a step for people: log, HTML page and MLflow traces."""
