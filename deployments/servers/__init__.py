"""Servers of `tinker-flows up`, and what they are given: a work pool, deployments and automations."""
