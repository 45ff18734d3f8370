"""Decoder definitions and the configurations they are built from."""
