"""Local training and sampling service that speaks the Tinker API."""
