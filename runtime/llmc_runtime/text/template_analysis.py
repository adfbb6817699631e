"""Determines which parts of messages and tools a chat template reads, from its syntax tree."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes


@dataclass(frozen=True)
class TemplateFeatures:
    """The parts of messages and tools that a template uses.

    - `parts`: it iterates over the parts of a message's content itself.
    - `tools`: it shows tools.
    - `calls`: it shows the tool calls of earlier messages.
    - `arguments_as_text`: it concatenates a call's arguments with text, so they must be a string instead of an object.
    - `roles`: the roles that it compares with a message's role, or looks up by it.
    - `documents`: it shows documents.
    """

    parts: bool
    tools: bool
    calls: bool
    arguments_as_text: bool
    roles: frozenset[str] = frozenset()
    documents: bool = False


def analyze_template(tree: Any) -> TemplateFeatures:
    """Analyze a template parsed by Jinja2."""
    loops = any("content" in _names(loop.iter) for loop in tree.find_all(nodes.For))
    used = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "load"}
    calls, roles = "tool_calls" in _names(tree), frozenset(_roles(tree))
    return TemplateFeatures(loops, "tools" in used, calls, _joins_arguments(tree), roles, "documents" in used)


def _names(node: Any) -> Iterator[Any]:
    """Yield the attributes, constants and variables in a node and its descendants."""
    yield from (n.attr for n in [node, *node.find_all(nodes.Getattr)] if isinstance(n, nodes.Getattr))
    yield from (n.value for n in node.find_all(nodes.Const))
    yield from (n.name for n in [node, *node.find_all(nodes.Name)] if isinstance(n, nodes.Name))


def _roles(tree: Any) -> Iterator[str]:
    """Yield the strings that a role is compared with or set to, and the keys of dicts that are indexed with a role."""
    assigned = [node for node in tree.find_all(nodes.Assign) if isinstance(node.target, nodes.Name)]
    variables = {"role", *(node.target.name for node in assigned if _is_role(node.node, {"role"}))}
    candidates = [node.node for node in assigned if node.target.name in variables]
    for item in tree.find_all(nodes.Getitem):
        mapping = _bare(item.node)
        if _is_role(item.arg, variables) and isinstance(mapping, nodes.Dict):
            candidates += [pair.key for pair in mapping.items]
    for comparison in tree.find_all(nodes.Compare):
        sides = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        if any(_is_role(side, variables) for side in sides):
            candidates += sides
    for node in candidates:
        if not _is_role(node, variables):
            texts = [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const)
            yield from (text.value for text in texts if isinstance(text.value, str))


def _is_role(node: Any, variables: Collection[str]) -> bool:
    """Whether an expression is a message's role, perhaps filtered; `variables` are the names of those that hold one."""
    match _bare(node):
        case nodes.Name(name=name):
            return name in variables
        case nodes.Getattr(attr=attribute):
            return bool(attribute == "role")
        case nodes.Getitem(arg=key):
            return getattr(key, "value", None) == "role"
        case nodes.Call(node=method, args=arguments):  # message.get("role")
            return getattr(method, "attr", None) == "get" and "role" in [getattr(a, "value", None) for a in arguments]
        case nodes.Filter(node=filtered):
            return _is_role(filtered, variables)
    return False


def _bare(node: Any) -> Any:
    """Return the expression without the sandbox's checks around it (see sandbox.Guard)."""
    while isinstance(node, nodes.Call) and isinstance(node.node, nodes.ExtensionAttribute) and len(node.args) == 1:
        node = node.args[0]
    return node


def _joins_arguments(tree: Any) -> bool:
    """Return whether arguments are output or concatenated as they are, without any test of their type."""

    def bare(node: Any) -> bool:
        if isinstance(node, nodes.Getattr):
            return bool(node.attr == "arguments")
        if isinstance(node, nodes.Name):
            return node.name in named
        return isinstance(node, nodes.Getitem) and getattr(node.arg, "value", None) == "arguments"

    named: set[str] = set()  # variables that contain arguments
    assigned = [node for node in tree.find_all(nodes.Assign) if hasattr(node.target, "name")]
    named |= {node.target.name for node in assigned if bare(node.node)}
    tested = any(bare(test.node) and test.name in ("string", "mapping") for test in tree.find_all(nodes.Test))
    # Calls with which the sandbox replaces the operator ~.
    joins = [call for call in tree.find_all(nodes.Call) if getattr(call.node, "name", "") == "joined"]
    writers = [*tree.find_all((nodes.Add, nodes.Concat, nodes.Output)), *joins]
    return not tested and any(bare(child) for writer in writers for child in writer.iter_child_nodes())
