"""The front end: semantic functions, semantic variables, and sessions."""
