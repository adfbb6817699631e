"""The error type that users see, and the conversion of other exceptions into it."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from llmc_runtime.format.install_command import install_command

_ENVIRONMENT = frozenset("E100 E109 E110 E115 E116 E117 E140 E141 E143 E332 E501 E503 E504 E640".split())


# Extra of the install -> the modules that it provides and that are imported by name.
EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "compile": ("torch", "transformers", "ml_dtypes", "safetensors", "huggingface_hub"),
        "serve": ("starlette", "uvicorn", "zmq", "msgspec", "prometheus_client", "yaml"),
        "grammar": ("llguidance",),
        "tracing": ("opentelemetry",),
        "ray": ("ray",),
    }
)
_CODES = MappingProxyType({"compile": "E640", "serve": "E665", "grammar": "E650", "tracing": "E665", "ray": "E140"})


class LlmcError(Exception):
    """A failure with a stable code, its cause and a remedy.

    `code` is "E" and three digits: E1xx artifact, E2xx memory and limits, E3xx model and checkpoint, E4xx IR and
    passes, E5xx toolchain, E6xx request. The printed form has at most five lines and contains no control characters.
    `param` is the name of the request's parameter whose value is the cause; "" if there is none.
    """

    def __init__(self, code: str, cause: str, remedy: str = "", param: str = "") -> None:
        super().__init__(code, cause, remedy)
        self.code, self.param = code, param
        self.cause = brief(cause, 4)
        self.remedy = brief(" ".join(remedy.split()), 1)

    @property
    def of_environment(self) -> bool:
        """Whether the machine is the cause (installed software, CPU, GPU, driver). Commands then exit with status 3."""
        return self.code in _ENVIRONMENT

    def __str__(self) -> str:
        head = f"LLMC-{self.code}: {self.cause}"
        return f"{head}\n  Try: {self.remedy}" if self.remedy else head


_MAX_CHARACTERS = 700


def llm_closed() -> LlmcError:
    """Return the error for a request to an LLM that is closed."""
    return LlmcError("E608", "the LLM is closed", "open another one: LLM(...)")


def brief(text: str, lines: int) -> str:
    """Shorten `text` for a terminal.

    The result has at most `lines` lines. The middle of a long text is left out; control characters, unpaired surrogates
    and direction marks are escaped.
    """
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[: _MAX_CHARACTERS - 150]} [...] {text[-100:]}"
    rows = text.split("\n")
    shown = rows if len(rows) <= lines else [*rows[: lines - 1], f"[{len(rows) - lines + 1} more lines]"]
    return "\n".join(map(printable, shown))


def printable(text: str) -> str:
    """Return a text with control characters, unpaired surrogates and direction marks escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def require_compiler(why: str = "") -> None:
    """Raise LlmcError E640 unless the compiler and its dependencies are installed. Imports nothing.

    `why` is the cause's first half, for example "the model is not compiled".
    """
    lacking = [name for name in ("llmc", *EXTRAS["compile"]) if importlib.util.find_spec(name) is None]
    if lacking:
        raise _not_installed(lacking, why)


def missing_extra(module: str) -> LlmcError | None:
    """Return the error for a module that is not installed, E140, E640, E650 or E665; None if no extra provides it."""
    name = module.partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if name in modules), "")
    if extra == "compile":
        return _not_installed([m for m in EXTRAS[extra] if m == name or importlib.util.find_spec(m) is None])
    cause = f"the package {name} is needed here, and is not installed"
    return LlmcError(_CODES[extra], cause, install_command(extra)) if extra else None


def _not_installed(modules: Sequence[str], why: str = "") -> LlmcError:
    head = f"{why}, and the compiler is" if why else "the compiler is"
    elsewhere = "compile elsewhere (llmc compile MODEL -o model.llmc) and open that"
    remedy = f"{install_command('compile')}, or {elsewhere}"
    return LlmcError("E640", f"{head} not installed here ({', '.join(modules)} missing)", remedy)


def as_llmc_error(error: BaseException) -> LlmcError:
    """Convert an exception for display by a command.

    E100 for OS errors, E203 for lack of memory, E140, E640, E650 and E665 for packages that are not installed, E000 for
    bugs.
    """
    if isinstance(error, LlmcError):
        return error
    if isinstance(error, MemoryError):
        return LlmcError("E203", "the system has too little free memory", "stop other programs")
    if isinstance(error, OSError):
        file = f": {error.filename}" if error.filename else ""
        return LlmcError("E100", f"{error.strerror or error}{file}", "check the path and its permissions")
    if isinstance(error, ModuleNotFoundError) and (missing := missing_extra(error.name or "")):
        return missing
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    cause = f"this is a bug in llmc, not in your input: {type(error).__name__}: {str(error)[:200]}{at}"
    return LlmcError("E000", cause, "run it again with -v, and report the output")
