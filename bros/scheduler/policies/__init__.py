"""Policies order and bound what the packing loop may run; they never allocate."""

from __future__ import annotations

from bros.scheduler.policies.base import Policy, Proposal

__all__ = ["Policy", "Proposal"]
