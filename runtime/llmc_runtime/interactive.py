"""llmc-run: one prompt streamed to stdout or as a JSON document, or an interactive chat."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.prompts import as_prompt

if TYPE_CHECKING:
    from llmc_runtime.api.llm import LLM, Stream
    from llmc_runtime.logprobs import Row
    from llmc_runtime.outputs import Piece, RequestOutput
    from llmc_runtime.sched.sampling_params import SamplingParams

MAX_TOKENS = 256
_HELP = (
    "Ctrl-C stops an answer or clears the line, Ctrl-D or /exit ends, /clear starts a new conversation, /help prints "
    "this line"
)
_CHAT = "chat with the model"
_NO_CHAT = "the model has no chat template: each line is continued on its own"
_COMMAND = re.compile(r"/[a-z?]+")


class Clock:
    """Measures the stages of a run in seconds since the process started. With `shown` it prints each to stderr."""

    def __init__(self, shown: bool = False) -> None:
        self.shown = shown
        self.stages: dict[str, float] = {}
        self._began = time.perf_counter() - _process_age()
        self._last = self._began

    @property
    def elapsed(self) -> float:
        """Seconds since the process started."""
        return time.perf_counter() - self._began

    def stage(self, name: str) -> None:
        """End a stage, which began when the previous one ended."""
        now = time.perf_counter()
        self.stages[name] = now - self._last
        self._last = now
        self.say(f"{name}: {self.stages[name]:.3f} s")

    def say(self, line: str) -> None:
        """Print a line to stderr if `shown`."""
        if self.shown:
            print(f"llmc: {line}", file=sys.stderr, flush=True)


class Session:
    """An open model and the command line's sampling parameters, `overrides`, which replace the model's defaults."""

    def __init__(
        self, llm: LLM, overrides: Mapping[str, Any], clock: Clock, *, system: str | None = None, quiet: bool = False
    ) -> None:
        self.llm, self.overrides, self.clock, self.system, self.quiet = llm, dict(overrides), clock, system, quiet

    def params(self, *, chat: bool) -> SamplingParams:
        """Return the model's defaults, with the parameters of the command line."""
        base = self.llm.get_default_sampling_params(max_tokens=None if chat else MAX_TOKENS)
        return replace(base, **self.overrides)

    def answer(self, prompt: str, *, chat: bool, as_json: bool) -> int:
        """Answer one prompt on stdout, and return the exit code. Raises LlmcError E6xx."""
        stream = self._open_stream([*self._opening(), {"role": "user", "content": prompt}], chat=chat)
        began = time.perf_counter()
        with stream:
            text = self._write(stream, show=not as_json)
            if as_json:
                document = self._document(stream.output, time.perf_counter() - began)
                _write_stdout(json.dumps(document, ensure_ascii=not _unicode()) + "\n")
            elif not text.endswith("\n"):
                _write_stdout("\n")
            self._report(stream.output, time.perf_counter() - began)
        return 0

    def run_dialog(self) -> int:
        """Read and answer prompts until the input ends. Return the exit code."""
        chat = self.llm.has_chat_template
        if not self.quiet:
            _say(f"{_CHAT if chat else _NO_CHAT}; {_HELP}")
        _line_editing()
        messages = self._opening()
        while (line := _read_input()) is not None:
            command = line.strip()
            if command in ("/exit", "/quit", "/bye"):
                return 0
            if command == "/clear":
                messages = self._opening()
            elif _COMMAND.fullmatch(command):
                _say(_HELP if command in ("/help", "/?") else f"unknown command {command}; {_HELP}")
            elif command:
                self._answer(messages, line, chat=chat)
        return 0

    def _answer(self, messages: list[dict[str, str]], prompt: str, *, chat: bool) -> None:
        """Answer `prompt`. It is added to `messages` if it was answered completely or in part."""
        began = time.perf_counter()
        conversation = [*messages, {"role": "user", "content": prompt}]
        try:
            with self._open_stream(conversation, chat=chat) as stream:
                try:
                    self._write(stream, show=True)
                except KeyboardInterrupt:
                    print("\nllmc: stopped", file=sys.stderr)
                _write_stdout("\n")
                answer = stream.output
        except LlmcError as e:
            print(e, file=sys.stderr)
            if e.code in ("E602", "E604"):
                _say("the conversation is too long; /clear starts a new one")
            return
        messages[:] = [*conversation, {"role": "assistant", "content": answer.outputs[0].text}]
        self._report(answer, time.perf_counter() - began)

    def _open_stream(self, conversation: Sequence[Mapping[str, str]], *, chat: bool) -> Stream:
        """Answer the conversation, or without `chat` continue its last text. A default max_tokens is reduced to what
        fits; one of the command line is not."""
        llm, params = self.llm, self.params(chat=chat)
        prompt = llm.chat_prompt(conversation) if chat else as_prompt(conversation[-1]["content"], llm.tokenizer)
        return llm.stream(prompt, params if "max_tokens" in self.overrides else llm.fitted(params, prompt))

    def _opening(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _write(self, stream: Iterable[Piece], *, show: bool) -> str:
        text = ""
        first = True
        for piece in stream:
            if first:
                self.clock.stage("first token")
                self.clock.say(f"process start to first token: {self.clock.elapsed:.3f} s")
                first = False
            text += piece.text
            if show and piece.text:
                _write_stdout(piece.text)
        return text

    def _report(self, output: RequestOutput, seconds: float) -> None:
        tokens = len(output.outputs[0].token_ids)
        prompt = f"{len(output.prompt_token_ids)} prompt tokens ({output.num_cached_tokens} cached)"
        self.clock.say(f"{prompt}, {tokens} tokens in {seconds:.3f} s: {tokens / max(seconds, 1e-9):.1f} tok/s")

    def _document(self, output: RequestOutput, seconds: float) -> dict[str, Any]:
        """Return what `--json` prints; times are in seconds."""
        completion = output.outputs[0]
        document: dict[str, Any] = {
            "model": self.llm.model,
            "prompt": output.prompt,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "usage": {
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": len(completion.token_ids),
                "cached_tokens": output.num_cached_tokens,
            },
            "seconds": {"total": seconds, "since_start": self.clock.elapsed, **self.clock.stages},
        }
        if completion.logprobs is not None:
            document["logprobs"] = [_candidates(row) for row in completion.logprobs if row is not None]
        return document


def _candidates(row: Row) -> list[dict[str, Any]]:
    """Return the log-probabilities at a position as JSON values."""
    return [{"id": i, "token": c.decoded_token, "logprob": c.logprob, "rank": c.rank} for i, c in row.items()]


def _unicode() -> bool:
    """Whether standard output can encode every character."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def _write_stdout(text: str) -> None:
    """Write to standard output and flush; characters that its encoding lacks are escaped. Raises LlmcError E644."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        raise LlmcError("E644", f"standard output cannot be written: {e.strerror}", "free space there") from e


def _say(text: str) -> None:
    print(f"llmc: {text}", file=sys.stderr)


def _read_input() -> str | None:
    """Read a line, or return None at the end of the input. Ctrl-C clears the line; twice in a row, it is raised."""
    cleared = False
    while True:
        try:
            return _read_line()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            if cleared:
                raise
            cleared = True
            print("\nllmc: Ctrl-C again, or Ctrl-D, ends the session", file=sys.stderr)


def _read_line() -> str:
    """Read a line from the user. The prompt goes to stderr unless stdout is a terminal."""
    if sys.stdout.isatty():
        return input(">>> ")
    print(">>> ", end="", file=sys.stderr, flush=True)
    return input()


def _line_editing() -> None:
    """Enable arrow keys and history if Python has readline."""
    try:
        import readline  # noqa: F401
    except ImportError:
        pass


def _process_age() -> float:
    """Return the seconds since this process was started; 0 if /proc is not available."""
    try:
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        import os

        return max(0.0, uptime - start / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
