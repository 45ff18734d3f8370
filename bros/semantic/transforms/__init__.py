"""What may be done to a value on its way into a prompt or out of an answer.

`parse_transforms("json_path($.items[*]) | join(', ')")` gives a function from text to text. The
table of all transforms is in docs/semantic.md.
"""

from bros.semantic.transforms.pipeline import REGISTRY, Transforms, parse_transforms
from bros.semantic.transforms.steps import TransformError

__all__ = ["REGISTRY", "TransformError", "Transforms", "parse_transforms"]
