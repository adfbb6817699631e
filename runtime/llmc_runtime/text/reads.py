"""What a chat template reads of messages and tools, found in its syntax tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reads:
    """`parts`: it walks through the parts of a message's content by itself. `tools`: it shows tools; `calls`: it shows
    those of earlier messages. `arguments_as_text`: it joins a call's arguments with text, so they are no object.
    `roles`: the roles that it compares a message's role with, or looks up by it."""

    parts: bool
    tools: bool
    calls: bool
    arguments_as_text: bool
    roles: frozenset[str] = frozenset()


def reads(tree: Any) -> Reads:
    """Those of a template that jinja2 has parsed."""
    from jinja2 import nodes

    loops = any("content" in _names(loop.iter) for loop in tree.find_all(nodes.For))
    tools = any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name))
    return Reads(loops, tools, "tool_calls" in _names(tree), _joins_arguments(tree), frozenset(_roles(tree)))


def _names(node: Any) -> Iterator[Any]:
    """Attributes, constants and variables of a node and all below it."""
    from jinja2 import nodes

    yield from (n.attr for n in [node, *node.find_all(nodes.Getattr)] if isinstance(n, nodes.Getattr))
    yield from (n.value for n in node.find_all(nodes.Const))
    yield from (n.name for n in [node, *node.find_all(nodes.Name)] if isinstance(n, nodes.Name))


def _roles(tree: Any) -> Iterator[str]:
    """Texts that a role is compared with, or set to, and the keys of mappings that a role is looked up in."""
    from jinja2 import nodes

    def is_role(node: Any) -> bool:
        node = _bare(node)
        if isinstance(node, nodes.Name):
            return node.name in named
        if isinstance(node, nodes.Getattr):
            return bool(node.attr == "role")
        if isinstance(node, nodes.Getitem):
            return getattr(node.arg, "value", None) == "role"
        if isinstance(node, nodes.Call):  # message.get("role")
            return getattr(node.node, "attr", None) == "get" and "role" in (
                getattr(a, "value", None) for a in node.args
            )
        return isinstance(node, nodes.Filter) and is_role(node.node)

    named = {"role"}  # variables that are roles
    sets = [one for one in tree.find_all(nodes.Assign) if isinstance(one.target, nodes.Name)]
    named |= {one.target.name for one in sets if is_role(one.node)}
    found = [one.node for one in sets if one.target.name in named]
    for one in tree.find_all(nodes.Getitem):
        mapping = _bare(one.node)
        if is_role(one.arg) and isinstance(mapping, nodes.Dict):
            found += [pair.key for pair in mapping.items]
    for one in tree.find_all(nodes.Compare):
        sides = [one.expr, *(operand.expr for operand in one.ops)]
        found += sides if any(map(is_role, sides)) else []
    for node in found:
        if not is_role(node):
            texts = [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const)
            yield from (text.value for text in texts if isinstance(text.value, str))


def _bare(node: Any) -> Any:
    """The expression without the sandbox's checks around it (see sandbox.Guard)."""
    from jinja2 import nodes

    while isinstance(node, nodes.Call) and isinstance(node.node, nodes.ExtensionAttribute) and len(node.args) == 1:
        node = node.args[0]
    return node


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
