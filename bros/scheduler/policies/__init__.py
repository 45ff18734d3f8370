"""Policies order and bound what the packing loop may run; they never allocate."""

from __future__ import annotations

from bros.core.errors import ConfigError
from bros.scheduler.policies.base import Policy
from bros.scheduler.policies.fcfs import FcfsPolicy
from bros.scheduler.policies.priority import PriorityPolicy

__all__ = ["Policy", "make_policy"]


def make_policy(name: str) -> Policy:
    """The policy of that name. Raises ConfigError for an unknown one."""
    policies: tuple[Policy, ...] = (FcfsPolicy(), PriorityPolicy())
    for policy in policies:
        if policy.name == name:
            return policy
    known = ", ".join(policy.name for policy in policies)
    raise ConfigError(f"--policy: {name!r} is not one of {known}")
