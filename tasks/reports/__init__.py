"""Report of a run: page, charts and tables."""
