"""Several engines as one: who serves which request, and what becomes of it if that one is lost."""
