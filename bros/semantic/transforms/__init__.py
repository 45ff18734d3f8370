"""Transforms of values: inputs before they enter a prompt, outputs before they set a variable.

`parse_transforms("json_path($.items[*]) | join(', ')")` returns a function from text to text.
docs/semantic.md lists all transforms.
"""

from bros.semantic.transforms.pipeline import REGISTRY, Transforms, parse_transforms
from bros.semantic.transforms.steps import TransformError

__all__ = ["REGISTRY", "TransformError", "Transforms", "parse_transforms"]
