"""Routes requests to several engines, and continues them elsewhere when an engine is lost."""
