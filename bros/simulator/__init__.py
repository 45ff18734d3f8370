"""The engine on a virtual clock: the same scheduler, an executor that only takes time."""

REPLICA_ROWS, REPLICA_STEP_TOKENS = 256, 512
"""Most requests and tokens of an iteration of a simulated replica, as in Preble's engines."""
