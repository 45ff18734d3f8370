"""`bros bench`: what hybrid load a server can carry within its objectives, seen from outside."""
