"""Numerical primitives. `reference` defines every operation; other back ends must agree with it."""
