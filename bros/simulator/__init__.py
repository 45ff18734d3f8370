"""The engine on a virtual clock: the same scheduler, an executor that only takes time."""
