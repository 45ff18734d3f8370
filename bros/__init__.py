"""bros: an LLM inference engine that serves real-time and best-effort requests together."""

__version__ = "0.1.0"
