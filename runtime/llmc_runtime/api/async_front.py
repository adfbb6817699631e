"""The part of an artifact that the serving process reads: tokenizer, templates, defaults, and the engine's start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc_runtime.api.llm import resolve
from llmc_runtime.api.model_api import open_tokenizer
from llmc_runtime.artifact import TOKENIZER
from llmc_runtime.engine.messages import Open
from llmc_runtime.engine_args import EngineArgs
from llmc_runtime.exec.draft_artifact import joint_digest
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.python_command import module_command, quoted
from llmc_runtime.text.tokenizer import Tokenizer

_GPU_STEP, _CPU_STEP = 30.0, 300.0  # default of step_timeout, in seconds


@dataclass(frozen=True)
class Front:
    """A model as the front end needs it: the engine's command line and first message, and the text side.

    `generation` are the sampling defaults of the artifact; `step_timeout` is the default of that option, in seconds.
    `read_text` returns the tokenizer and the token that ends a text, if it has one; it is called if `opening` lacks
    these tokens. Raises LlmcError E106, E107, E15x.
    """

    command: Sequence[str]
    opening: Open
    tokenizer: Tokenizer | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    step_timeout: float = _CPU_STEP
    pooling: Pooling | None = None
    read_text: Callable[[], tuple[Tokenizer | None, list[int]]] = lambda: (None, [])


def compiled(args: EngineArgs, say: Callable[[str], None]) -> Path:
    """Return the path of the artifact, compiling the model first if it is none. Raises LlmcError as LLM does."""
    return resolve(args.model, args.compile_options, Path(args.cache_dir) if args.cache_dir else None, say)


def read_front(args: EngineArgs, say: Callable[[str], None]) -> Front:
    """Read the manifest of the artifact, compiling it first if needed. Raises LlmcError E1xx, E208, E64x."""
    path = compiled(args, say)
    folder = Folder(path)
    manifest = folder.manifest()
    args.check_artifact(manifest)
    opening = Open(quoted(path), args.message(), None, joint_digest(path, manifest, args.draft_model))
    step = _CPU_STEP if manifest.target.name.startswith("cpu") else _GPU_STEP
    command = module_command("llmc_runtime.engine.engine_process")

    def read_text() -> tuple[Tokenizer | None, list[int]]:
        for error in folder.check_small(manifest.files):
            raise error
        return open_tokenizer(path / TOKENIZER, manifest)

    return Front(command, opening, None, manifest.generation, step, manifest.pooling, read_text)
