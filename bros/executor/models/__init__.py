"""The decoder, its layers, and the model configurations that it is built from."""
