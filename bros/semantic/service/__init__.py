"""Sessions on the server: the service, and the runner that submits LLM calls to the engine."""
