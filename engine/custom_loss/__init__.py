"""Losses that a client traced: a graph of named operations, checked, then run datum by datum.

Nothing of a client is ever executed: a graph names operations, and those that `operations` lists are looked up. They
run on the CPU, since a wrong index, which raises there, would end a GPU's process.
"""
