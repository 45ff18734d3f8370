"""The HTTP server: an OpenAI-compatible API in front of an EngineClient."""
