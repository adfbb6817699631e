"""The Jinja2 environment of chat templates: transformers' dialect in a sandbox, with limits on time and size.

Invariants for any template: rendering ends within the budget's time (plus one bounded operation); no value that it
builds is longer than the budget's size; all of them take at most `_TOTAL_BYTES`. Attribute access beyond Jinja2's
immutable sandbox is an error.

Templates of artifacts are rendered for every chat, most of them in threads of the server, which the system cannot limit
one by one. Jinja2's own sandbox limits only `range`, so the checks are inserted here.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_NUMBER = re.compile(r"\d+")
_TOTAL_BYTES = 48 << 20
_STEP_BYTES = 64  # bytes charged per loop iteration for the values it may leave behind
_MAX_NODES = 100_000  # nested values in one that is printed or compared, counted once per reference
_SLOW_SIZE = 100_000  # input size in characters or items of filters that spend long on each
_SLOW_FILTERS = frozenset(
    {"wordwrap", "urlize", "striptags", "wordcount", "pprint", "groupby", "sort", "unique", "title", "xmlattr"}
)
_FLAT_FILTERS = frozenset({"length", "count", "first", "last", "list", "default", "d", "reverse", "batch", "slice"})
_WALKED_TESTS = frozenset({"eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "gt", "greaterthan", ">", "le",
                           "<=", "ge", ">=", "in"})  # fmt: skip
_WIDEST_INDENT = 1024
_MAX_POWER = 1024
_MAX_BITS = 1 << 16
_REPEATING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class OverBudget(Exception):
    """A template exceeded its time or size limits."""


class Budget(threading.local):
    """The limits of a thread's rendering: `seconds` of CPU time, and `size` characters or items in one value."""

    def __init__(self, seconds: float, size: int) -> None:
        self.seconds = seconds
        self.size = size
        self._deadline = float("inf")
        self._remaining = _TOTAL_BYTES

    def start(self) -> None:
        """Start a rendering and its timer."""
        self._deadline = time.thread_time() + self.seconds
        self._remaining = _TOTAL_BYTES

    def tick(self) -> None:
        """Raise OverBudget if the time is up."""
        if time.thread_time() > self._deadline:
            raise OverBudget(f"it ran longer than {self.seconds:g} s")
        self._charge(_STEP_BYTES)

    def need(self, size: int) -> None:
        """Raise OverBudget if a value of `size`, which is about to be built, is too large."""
        if size > self.size:
            raise OverBudget(f"it builds a value of {size} characters; the limit is {self.size}")

    def built(self, value: Any) -> Any:
        """Charge the memory of a value that has just been built, and return the value."""
        if isinstance(value, (str, list, tuple, dict)):
            self._charge(sys.getsizeof(value))
        return value

    def walk(self, *values: Any) -> None:
        """Raise OverBudget if printing, comparing or hashing the values would visit too many nested values.

        Values are counted once per reference: a list that contains another list twice, nested forty times, is small in
        memory but exponentially large when printed.
        """
        remaining, todo = _MAX_NODES, [v for v in values if isinstance(v, _HOLDERS)]
        while todo:
            value = todo.pop()
            inner = [*value, *value.values()] if isinstance(value, dict) else _inside(value)
            remaining -= len(inner)
            if remaining < 0:
                raise OverBudget(f"it prints or compares a value of more than {_MAX_NODES} parts")
            todo += [v for v in inner if isinstance(v, _HOLDERS)]

    def _charge(self, size: int) -> None:
        self._remaining -= size
        if self._remaining < 0:
            raise OverBudget(f"it builds values of more than {_TOTAL_BYTES} bytes in all")


_HOLDERS = (list, tuple, dict, Namespace)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Namespace):  # a Namespace exposes only its own attributes
        return list(object.__getattribute__(value, "_Namespace__attrs").values())
    return list(value)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """transformers' dialect: trimmed blocks, loop controls, generation tag, tojson, raise_exception, strftime_now."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, Guard, jinja2.ext.loopcontrols],
            finalize=self._printed,
        )
        self.budget = budget
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
        self.filters = {name: _capped_filter(name, f, budget) for name, f in self.filters.items()}
        self.filters["tojson"] = _capped_filter("tojson", tojson, budget)
        for name in _WALKED_TESTS & self.tests.keys():
            self.tests[name] = _walked(cast(Callable[..., Any], self.tests[name]), budget)
        self.concat = self.join  # type: ignore[method-assign]

    def _printed(self, value: Any) -> Any:
        """Check the size of a value printed by `{{ value }}`."""
        self.budget.walk(value)
        return value

    def join(self, parts: Iterable[Any]) -> str:
        """Join the parts if all of them together are within the budget. Generated code passes all output here."""
        texts = list(parts)
        self.budget.need(sum(map(len, texts)))
        return str(self.budget.built("".join(texts)))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function from a template, after checks of the time and of the size of its result."""
        self.budget.tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            self.budget.need(_str_method_size(owner, obj.__name__, args, kwargs))
        if isinstance(owner, (str, list, tuple, dict)):
            self.budget.walk(*args, *kwargs.values(), owner if obj.__name__ in ("index", "count") else None)
        return self.budget.built(super().call(context, obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item. A key that is a tuple is checked, as it will be hashed."""
        self.budget.walk(argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Apply the immutable sandbox's rules and forbid `str.translate`, which can multiply sizes."""
        return not (isinstance(obj, str) and attr == "translate") and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed `str.format`, with a check of the padding that the format requests."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            self.budget.need(_widths(value.__self__, [*args, *kwargs.values()]))
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an intercepted operator, after a check of the size of its result."""
        self.budget.need(_binop_size(operator, left, right))
        if operator == "%":
            self.budget.walk(right)
        return self.budget.built(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Guarding(self).visit(tree)


class Generation(jinja2.ext.Extension):
    """The tag `{% generation %} ... {% endgeneration %}` around an assistant's text, whose content is kept as it is."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> nodes.Node:
        """Parse the body into a separate scope, as transformers' call block does."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller: Callable[[], str]) -> str:
        """Return the rendered content."""
        return caller()


class Guard(jinja2.ext.Extension):
    """The functions called by the checks that `_Guarding` inserts. Templates can neither name nor replace them."""

    def tick(self) -> str:
        """Check the time; the call itself does so (see `ChatEnvironment.call`)."""
        return ""

    def joined(self, *parts: Any) -> str:
        """Evaluate `a ~ b` within the size limit."""
        self._budget.walk(*parts)
        return str(self.environment.concat([str(p) for p in parts]))

    def built(self, value: Any) -> Any:
        """Charge the memory of a list or dict literal or of a slice. The keys of a dict have been hashed by then."""
        return self._budget.built(value)

    def walked(self, value: Any) -> Any:
        """Check the size of a value that is compared or used as a key."""
        self._budget.walk(value)
        return value

    @property
    def _budget(self) -> Budget:
        return self.environment.budget  # type: ignore[attr-defined]


class _Guarding(NodeTransformer):
    """Inserts checks into a template's syntax tree.

    Every loop body begins with a time check (calls check the time themselves). The operator `~`, list and dict
    literals, slices, and both sides of a comparison are passed through size checks.
    """

    def __init__(self, environment: ChatEnvironment) -> None:
        self.guard = environment.extensions[Guard.identifier]

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Insert a time check at the start of the loop's body."""
        self.generic_visit(node)
        call = self.guard.call_method("tick", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Replace `a ~ b ~ c` with one checked call."""
        self.generic_visit(node)
        return self.guard.call_method("joined", list(node.nodes), lineno=node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """Charge the memory of a list literal."""
        self.generic_visit(node)
        return self._counted(node) if node.items else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """Charge the memory of a dict literal, and check its keys before they are hashed."""
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = self.guard.call_method("walked", [pair.key], lineno=node.lineno)
        return self._counted(node) if node.items else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Charge the memory of a slice, which is a copy."""
        self.generic_visit(node)
        return self._counted(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Check both sides of a comparison, unless one is a constant: then the other cannot make it expensive."""
        self.generic_visit(node)
        sides = [node.expr, *(o.expr for o in node.ops)]
        if not any(isinstance(side, nodes.Const) for side in sides):
            node.expr = self.guard.call_method("walked", [node.expr], lineno=node.lineno)
            for operand in node.ops:
                operand.expr = self.guard.call_method("walked", [operand.expr], lineno=node.lineno)
        return node

    def _counted(self, node: Any) -> nodes.Node:
        return self.guard.call_method("built", [node], lineno=node.lineno)


def raise_exception(message: str) -> None:
    """Let the template reject the messages."""
    raise jinja2.TemplateError(str(message))


def strftime_now(format: str) -> str:
    """Return the local time, formatted."""
    return datetime.now().strftime(format)


def tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Serialize to JSON as transformers does. Unlike Jinja2's own filter, it does not escape for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 0


def _largest_int(values: Iterable[Any]) -> int:
    return max((v for v in values if isinstance(v, int)), default=0)


def _widths(text: str, values: Iterable[Any]) -> int:
    """Return an upper bound of the padding that a format string can request."""
    fields = text.count("%") + text.count("{")
    return sum(int(n[:9]) if len(n) < 10 else 1 << 40 for n in _NUMBER.findall(text)) + fields * _largest_int(values)


def _binop_size(operator: str, left: Any, right: Any) -> int:
    """Return an upper bound of the result's length. Raises OverBudget for too large numbers."""
    if operator == "+":
        return _length(left) + _length(right)
    if operator == "%":
        values = right if isinstance(right, tuple) else (right,)
        return _widths(left, values) if isinstance(left, str) else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
        if bits > _MAX_BITS or (operator == "**" and abs(right) > _MAX_POWER):
            raise OverBudget("it computes a number of more than 65536 bits")
    elif operator == "*":
        times = next((factor for factor in (left, right) if isinstance(factor, int)), 0)
        return max(0, times) * max(_length(left), _length(right))
    return 0


def _str_method_size(text: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return an upper bound of the result's length; 0 if it is not longer than the arguments."""
    if method in _REPEATING:
        return (1 + (text.count("\t") if method == "expandtabs" else 0)) * _largest_int([*args, *kwargs.values()])
    if method == "replace" and len(args) >= 2:
        return _replaced_size(text, args[0], args[1])
    return _joined_size(text, args[0]) if method == "join" and args else 0


def _replaced_size(text: str, old: Any, new: Any) -> int:
    if not isinstance(old, str) or not isinstance(new, str):
        return 0
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _joined_size(separator: str, items: Any) -> int:
    if not isinstance(items, (str, list, tuple)):
        return 0
    return len(separator) * len(items) + sum(map(_length, items))


def _capped_filter(name: str, function: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    """Wrap a filter with a check of the size of its result; Jinja2's pass_* marks are kept."""
    marked = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def capped(*args: Any, **kwargs: Any) -> Any:
        budget.tick()
        value, rest = (args[1], args[2:]) if marked and len(args) > 1 else (args[0], args[1:])
        budget.need(_filter_size(name, value, [*rest, *kwargs.values()]))
        if name not in _FLAT_FILTERS:
            budget.walk(value, *rest, *kwargs.values())
        return budget.built(function(*args, **kwargs))

    return capped


def _walked(function: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    """Wrap a test that compares values with a check of their sizes."""

    def walked(*args: Any) -> Any:
        budget.walk(*args)
        return function(*args)

    return walked


def _filter_size(name: str, value: Any, arguments: list[Any]) -> int:
    """Return an upper bound of a filter's result, in characters or items. Raises OverBudget for too slow filters."""
    if name in _SLOW_FILTERS and _length(value) > _SLOW_SIZE:
        raise OverBudget(f"{name} of {_length(value)} characters or items; the limit is {_SLOW_SIZE}")
    if name == "list" and isinstance(value, str):
        return max(len(value) * 16, _largest_int(arguments))
    if name in ("indent", "tojson"):
        widest = max([_largest_int(arguments), *(len(v) for v in arguments if isinstance(v, str))], default=0)
        if widest > _WIDEST_INDENT:
            raise OverBudget(f"it indents by {widest}; the limit is {_WIDEST_INDENT}")
        return widest * (value.count("\n") + 1 if isinstance(value, str) else 1)
    if name == "replace" and len(arguments) >= 2 and isinstance(value, str):
        return _replaced_size(value, arguments[0], arguments[1])
    if name == "join":
        return _joined_size(next((v for v in arguments if isinstance(v, str)), ""), value)
    if name == "format" and isinstance(value, str):
        return _widths(value, arguments)
    return _largest_int(arguments)
