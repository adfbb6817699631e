"""The compiler's error type. Programming errors stay ordinary Python exceptions."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import LlmcError


class Diagnostic(LlmcError):
    """An error that the user can act on.

    `code` is "E" and three digits: E3xx for models and checkpoints, E4xx for IR and passes, E5xx for toolchains. `node`
    is the IR node concerned, if any; `loc` is the module path in the model and defaults to the node's. Both are
    prepended to the cause, so that `str(error)` names the place.
    """

    def __init__(self, code: str, cause: str, remedy: str = "", node: Any = None, loc: str = "") -> None:
        self.node = node
        self.loc = loc or (node.loc if node is not None else "")
        where = " at ".join(filter(None, (node.op.name if node is not None else "", self.loc)))
        super().__init__(code, f"{where}: {cause}" if where else cause, remedy)

    def about(self, subject: str) -> Diagnostic:
        """Return the same error, with the same node and module path, whose cause begins with a subject."""
        error = Diagnostic(self.code, f"{subject}: {self.cause}", self.remedy)
        error.node, error.loc = self.node, self.loc
        return error


@contextmanager
def extension_code(subject: str, owner: Any, node: Any = None) -> Iterator[None]:
    """Raise Diagnostic E427 for an exception in the code of an extension, which runs inside the `with` block.

    subject: the part of the extension, such as "kernel 'a/b'". owner: its class or function, whose module decides
    whether the code is an extension's. Exceptions of llmc's own code, and errors that a user can act on, are not
    changed.
    """
    try:
        yield
    except (LlmcError, OSError, MemoryError):
        raise
    except Exception as e:
        module = getattr(owner, "__module__", None) or "llmc"
        if module.partition(".")[0] == "llmc":
            raise
        raise extension_error(f"{subject} of the module {module}", e, node) from e


def extension_error(subject: str, e: Exception, node: Any = None) -> Diagnostic:
    """Return Diagnostic E427 for an exception in an extension's code, with the last line of that code."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(str(_OWN))]
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    remedy = "correct the extension, or uninstall its package; -v prints the traceback"
    return Diagnostic("E427", f"{subject} failed: {type(e).__name__}: {e}{at}", remedy, node=node)


_OWN = Path(__file__).parent
