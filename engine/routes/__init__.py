"""The Tinker API's routes, one module per subject."""
