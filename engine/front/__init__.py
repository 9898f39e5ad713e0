"""Front of several engines: one process that listens on the port and forwards each request to the engine it concerns.

The front starts one engine process per device, because Python's lock would serialize the kernel launches of several
devices in one process. All engines share one state folder. A session, with its models, samplers and requests, belongs
to one engine (`engine.part.owner`). The front imports no torch.
"""
