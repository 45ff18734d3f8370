"""HTTP: the OpenAI-compatible API over an EngineClient."""
