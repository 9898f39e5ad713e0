"""Records and report of a sweep."""
