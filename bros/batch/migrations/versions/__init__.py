"""One module per version, in the order of their numbers."""
