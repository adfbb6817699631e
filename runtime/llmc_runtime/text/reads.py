"""What a chat template reads of messages and tools, found in its syntax tree; it renders nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reads:
    """`parts`: it walks through the parts of a message's content by itself. `tools`: it shows tools; `calls`: it shows
    those of earlier messages. `arguments_as_text`: it joins a call's arguments with text, so they are no object."""

    parts: bool
    tools: bool
    calls: bool
    arguments_as_text: bool


def reads(tree: Any) -> Reads:
    """Those of a template that jinja2 has parsed."""
    from jinja2 import nodes

    loops = any("content" in _names(loop.iter) for loop in tree.find_all(nodes.For))
    tools = any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name))
    return Reads(loops, tools, "tool_calls" in _names(tree), _joins_arguments(tree))


def _names(node: Any) -> Iterator[Any]:
    """Attributes, constants and variables of a node and all below it."""
    from jinja2 import nodes

    yield from (n.attr for n in [node, *node.find_all(nodes.Getattr)] if isinstance(n, nodes.Getattr))
    yield from (n.value for n in node.find_all(nodes.Const))
    yield from (n.name for n in [node, *node.find_all(nodes.Name)] if isinstance(n, nodes.Name))


def _joins_arguments(tree: Any) -> bool:
    """Whether arguments are written as they are, and nowhere asked what they are."""
    from jinja2 import nodes

    def bare(node: Any) -> bool:
        if isinstance(node, nodes.Getattr):
            return bool(node.attr == "arguments")
        if isinstance(node, nodes.Name):
            return node.name in called
        return isinstance(node, nodes.Getitem) and getattr(node.arg, "value", None) == "arguments"

    called: set[str] = set()  # variables that are arguments
    called |= {one.target.name for one in tree.find_all(nodes.Assign) if bare(one.node) and hasattr(one.target, "name")}
    asked = any(bare(test.node) and test.name in ("string", "mapping") for test in tree.find_all(nodes.Test))
    joins = [
        call for call in tree.find_all(nodes.Call) if getattr(call.node, "name", "") == "joined"
    ]  # the sandbox's ~
    writers = [*tree.find_all((nodes.Add, nodes.Concat, nodes.Output)), *joins]
    return not asked and any(bare(child) for writer in writers for child in writer.iter_child_nodes())
