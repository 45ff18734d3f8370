"""Sessions on the server: what runs the calls of programs on the engine."""
