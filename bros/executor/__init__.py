"""Weights, KV memory and the forward pass. Runs step plans, decides nothing."""
