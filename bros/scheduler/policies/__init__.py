"""Policies order and bound what the packing loop may run; they never allocate."""
