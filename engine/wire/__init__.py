"""Between the bytes of the Tinker protocol and this engine's own types."""
