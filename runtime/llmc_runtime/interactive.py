"""A model at a terminal: one prompt streamed to stdout, a JSON document, or a talk; it parses no arguments."""

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
    from llmc_runtime.outputs import Piece, RequestOutput
    from llmc_runtime.sched.sampling_params import SamplingParams

MAX_TOKENS = 256
_HELP = "Ctrl-C stops an answer, Ctrl-D ends; /clear forgets what was said, /help says this, /exit ends"
_COMMAND = re.compile(r"/[a-z?]+")


class Clock:
    """Seconds since the process began, by stage; `shown` prints each on stderr as it ends."""

    def __init__(self, shown: bool = False) -> None:
        self.shown = shown
        self.stages: dict[str, float] = {}
        self._began = time.perf_counter() - _process_age()
        self._last = self._began

    @property
    def elapsed(self) -> float:
        """Seconds since the process began."""
        return time.perf_counter() - self._began

    def stage(self, name: str) -> None:
        """A stage ends now."""
        now = time.perf_counter()
        self.stages[name] = now - self._last
        self._last = now
        self.say(f"{name}: {self.stages[name]:.3f} s")

    def say(self, line: str) -> None:
        """One line for people who asked for more."""
        if self.shown:
            print(f"llmc: {line}", file=sys.stderr, flush=True)


class Session:
    """An open model and the parameters of this run; `given` are those that differ from the model's own."""

    def __init__(
        self, llm: LLM, given: Mapping[str, Any], clock: Clock, *, system: str | None = None, quiet: bool = False
    ) -> None:
        self.llm, self.given, self.clock, self.system, self.quiet = llm, dict(given), clock, system, quiet

    def params(self, *, chat: bool) -> SamplingParams:
        """The model's defaults with what was given on the command line."""
        base = self.llm.get_default_sampling_params(max_tokens=None if chat else MAX_TOKENS)
        return replace(base, **self.given)

    def once(self, prompt: str, *, chat: bool, as_json: bool) -> int:
        """Answer one prompt on stdout. The exit code."""
        stream = self._begin([*self._opening(), {"role": "user", "content": prompt}], chat=chat)
        began = time.perf_counter()
        with stream:
            text = self._write(stream, show=not as_json)
            if as_json:
                document = self._document(stream.output, time.perf_counter() - began)
                _put(json.dumps(document, ensure_ascii=not _unicode()) + "\n")
            elif not text.endswith("\n"):
                _put("\n")
            self._report(stream.output, time.perf_counter() - began)
        return 0

    def talk(self) -> int:
        """Ask and answer until the input ends. The exit code."""
        chat = self.llm.has_chat_template
        if not self.quiet:
            kind = "you talk with the model" if chat else "no chat template: every line is continued by itself"
            print(f"llmc: {kind}; {_HELP}", file=sys.stderr)
        _line_editing()
        messages = self._opening()
        while True:
            try:
                said = _ask()
            except EOFError:
                print(file=sys.stderr)
                return 0
            command = said.strip()
            if command in ("/exit", "/quit", "/bye"):
                return 0
            if command == "/clear":
                messages = self._opening()
            elif _COMMAND.fullmatch(command):
                known = command in ("/help", "/?")
                print(f"llmc: {'' if known else f'there is no {command}; '}{_HELP}", file=sys.stderr)
            elif command:
                self._turn(messages, said, chat=chat)

    def _turn(self, messages: list[dict[str, str]], said: str, *, chat: bool) -> None:
        """One answer; what was said stays in `messages` only if it was answered, wholly or in part."""
        began = time.perf_counter()
        talk = [*messages, {"role": "user", "content": said}]
        try:
            with self._begin(talk, chat=chat) as stream:
                try:
                    self._write(stream, show=True)
                except KeyboardInterrupt:
                    print("\nllmc: stopped", file=sys.stderr)
                _put("\n")
                answer = stream.output
        except LlmcError as e:
            print(e, file=sys.stderr)
            if e.code in ("E602", "E604"):
                print("llmc: the talk is full; /clear starts a new one", file=sys.stderr)
            return
        messages[:] = [*talk, {"role": "assistant", "content": answer.outputs[0].text}]
        self._report(answer, time.perf_counter() - began)

    def _begin(self, talk: Sequence[Mapping[str, str]], *, chat: bool) -> Stream:
        """Answer the talk, or without `chat` continue its last text. The default number of tokens, not one that was
        asked for, is cut to what fits."""
        llm, params = self.llm, self.params(chat=chat)
        prompt = llm.chat_prompt(talk) if chat else as_prompt(talk[-1]["content"], llm.tokenizer)
        return llm.stream(prompt, params if "max_tokens" in self.given else llm.fitted(params, prompt))

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
                _put(piece.text)
        return text

    def _report(self, output: RequestOutput, seconds: float) -> None:
        tokens = len(output.outputs[0].token_ids)
        prompt = f"{len(output.prompt_token_ids)} prompt tokens ({output.num_cached_tokens} cached)"
        self.clock.say(f"{prompt}, {tokens} tokens in {seconds:.3f} s: {tokens / max(seconds, 1e-9):.1f} tok/s")

    def _document(self, output: RequestOutput, seconds: float) -> dict[str, Any]:
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
            document["logprobs"] = [
                [{"id": i, "token": c.decoded_token, "logprob": c.logprob, "rank": c.rank} for i, c in row.items()]
                for row in completion.logprobs
                if row is not None
            ]
        return document


def _unicode() -> bool:
    """Whether standard output takes every character."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def _put(text: str) -> None:
    """Text to standard output, now; what its encoding lacks as a backslash escape. LlmcError E644 where it is lost."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        raise LlmcError("E644", f"standard output cannot be written: {e.strerror}", "free space there") from e


def _ask() -> str:
    """One line from the user; the mark goes to stderr where stdout is not the terminal."""
    if sys.stdout.isatty():
        return input(">>> ")
    print(">>> ", end="", file=sys.stderr, flush=True)
    return input()


def _line_editing() -> None:
    """Arrow keys and history, where Python was built with them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        pass


def _process_age() -> float:
    """Seconds since this process was started; 0 where Linux does not tell."""
    try:
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        import os

        return max(0.0, uptime - start / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
