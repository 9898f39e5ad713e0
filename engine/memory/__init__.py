"""Memory of adapters: the budget, the stores that move adapters to disk, and what a device has room for."""
