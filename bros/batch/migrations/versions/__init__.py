"""One module per version of the schema, in numeric order."""
