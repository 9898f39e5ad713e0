"""Where a term runs: on the calling thread, against a limit, on an event loop, or in a process of its own."""
