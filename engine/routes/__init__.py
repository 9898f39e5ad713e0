"""Routes of the Tinker API, one module per subject."""
