"""The engine: its step, its loop and its client."""
