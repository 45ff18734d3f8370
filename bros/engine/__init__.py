"""The iteration loop, and the ways to reach it: in process, or over a socket."""
