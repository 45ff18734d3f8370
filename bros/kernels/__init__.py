"""Numerical kernels. `reference` defines every operation; all other backends must agree with it."""
