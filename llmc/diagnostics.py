"""The compiler's error: what failed, where in the model, what to do; programming mistakes stay ordinary exceptions."""

from __future__ import annotations

from typing import Any

from llmc_runtime.format.errors import LlmcError


class Diagnostic(LlmcError):
    """An error a person can act on.

    `code` is "E" and three digits (E3xx model and checkpoint, E4xx IR and passes, E5xx toolchain). `node` is the IR
    node it is about, where there is one; `loc` the module path in the model (the node's own when not given). Both are
    put in front of the cause, so that `str(error)` names the place.
    """

    def __init__(self, code: str, cause: str, remedy: str = "", node: Any = None, loc: str = "") -> None:
        self.node = node
        self.loc = loc or (node.loc if node is not None else "")
        where = " at ".join(filter(None, (node.op.name if node is not None else "", self.loc)))
        super().__init__(code, f"{where}: {cause}" if where else cause, remedy)
