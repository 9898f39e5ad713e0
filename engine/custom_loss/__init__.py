"""Custom losses: graphs of named operations, traced by a client, checked, and run datum by datum.

No code of the client is ever executed: a graph names operations, which are looked up in `operations`. They run on the
CPU, because an index error raises there, but ends the process on a GPU.
"""
