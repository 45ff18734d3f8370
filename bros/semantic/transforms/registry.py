"""All transforms by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bros.semantic.transforms import lists, patterns, scalars, structured, texts
from bros.semantic.transforms.values import Function


@dataclass(frozen=True, slots=True)
class Entry:
    """make: of the arguments, raises ArgumentError. usage: how it is written. Between `least`
    and `most` arguments are taken. gives_list: one part can be taken with [i], some with [i:j]."""

    usage: str
    make: Callable[..., Function]
    least: int = 0
    most: int = 0
    gives_list: bool = False


_MANY = 100

REGISTRY: Mapping[str, Entry] = MappingProxyType(
    {
        "strip": Entry("strip", texts.strip),
        "lower": Entry("lower", texts.lower),
        "upper": Entry("upper", texts.upper),
        "truncate": Entry("truncate(n)", texts.truncate, 1, 1),
        "template": Entry('template("..{}..")', texts.template, 1, 1),
        "lines": Entry("lines[i]", lists.lines, gives_list=True),
        "split": Entry("split(sep)[i]", lists.split, 1, 1, gives_list=True),
        "comma_list": Entry("comma_list", lists.comma_list, gives_list=True),
        "numbered_list": Entry("numbered_list", lists.numbered_list, gives_list=True),
        "markdown_list": Entry("markdown_list", lists.markdown_list, gives_list=True),
        "join": Entry("join(sep)", lists.join, 1, 1),
        "regex": Entry("regex(pattern, group)", patterns.regex, 1, 2),
        "xml_tag": Entry("xml_tag(name)", patterns.xml_tag, 1, 1),
        "code_block": Entry("code_block(language)", patterns.code_block, 0, 1),
        "json": Entry("json", structured.json),
        "json_path": Entry("json_path(path)", structured.json_path, 1, 1),
        "yaml_path": Entry("yaml_path(path)", structured.yaml_path, 1, 1),
        "bool": Entry("bool", scalars.boolean),
        "int": Entry("int", scalars.integer),
        "float": Entry("float", scalars.number),
        "enum": Entry("enum(a|b)", scalars.enum, 1, _MANY),
        "datetime": Entry("datetime(format)", scalars.date_and_time, 0, 1),
    }
)
