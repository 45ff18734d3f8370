"""The engine on a virtual clock: the real scheduler, an executor that only advances the clock."""

REPLICA_ROWS, REPLICA_STEP_TOKENS = 256, 512
"""Default bounds of a simulated replica's step: requests and tokens, as in Preble's engines."""
