"""llmc-run on a toy artifact with a tokenizer: streams, JSON, pipes, dialogs, exit codes."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import textkit
from artifact import tiny
from llmc_runtime import __version__, cli, interactive
from llmc_runtime.cli import run_command
from llmc_runtime.option_type import parse_bytes

ROOT = Path(__file__).resolve().parents[2]
GREEDY = ("--temperature", "0")


def start(*args: str, **options: Any) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT / "runtime"), str(ROOT)])
    command = [sys.executable, "-m", "llmc_runtime.cli", *args]
    return subprocess.Popen(command, text=True, env={**os.environ, "PYTHONPATH": path}, **options)


def run(*args: str, stdin: str = "") -> tuple[int, str, str]:
    process = start(*args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(stdin)
    return process.returncode, out, err


def expected(prompt: str, count: int) -> str:
    tok = textkit.small()
    ids = tok.encode(prompt).ids
    start = len(ids)
    while len(ids) < start + count:
        ids.append(tiny.expected(ids, ids[start:].count(1)))
    return tok.decode(ids)[len(tok.decode(ids[:start])) :]


# --- what goes where


def test_only_the_text_is_on_stdout(toy: Path) -> None:
    code, out, err = run(str(toy), "--prompt", "abc", "--max-tokens", "6", "--ignore-eos")
    assert code == 0
    assert out == expected("abc", 6) + "\n"
    assert "KV cache: 128 tokens" in err
    assert "Traceback" not in err


def test_a_piped_prompt_and_quiet(toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(str(toy), "-n", "6", "--ignore-eos", "-q", stdin="abc") == (0, expected("abc", 6) + "\n", "")


def test_the_text_is_streamed(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Out(io.StringIO):
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1

    out = Out()
    monkeypatch.setattr(sys, "stdout", out)
    assert run_command([str(toy), "--prompt", "abc", "-n", "6", "--ignore-eos", "-q"]) == 0
    assert out.getvalue() == expected("abc", 6) + "\n"
    assert out.flushes >= len(expected("abc", 6))


def test_json_is_one_document(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([str(toy), "-p", "abc", "-n", "6", "--ignore-eos", "--json", "--logprobs", "2"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["text"] == expected("abc", 6)
    assert document["prompt"] == "abc"
    assert document["finish_reason"] == "length"
    assert document["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "cached_tokens": 0}
    assert len(document["token_ids"]) == len(document["logprobs"]) == 6
    assert document["logprobs"][0][0]["id"] == document["token_ids"][0]


def test_verbose_tells_the_time_to_the_first_token(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([str(toy), "-p", "abc", "-n", "4", "-v"]) == 0
    err = capsys.readouterr().err
    for words in ("imports: ", "open: ", "process start to first token: ", "tok/s"):
        assert words in err


def test_sampling_options_reach_the_model(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        interactive.Session, "answer", lambda self, prompt, **how: seen.append((self.params(chat=False), how)) or 0
    )
    given = (
        "-n 5 --min-tokens 2 -t 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2"
        " --frequency-penalty 0.3 --seed 9 --stop xx --stop yy --chat --system S"
    )
    assert run_command([str(toy), "-p", "abc", "-q", *given.split()]) == 0
    params, how = seen[0]
    assert how == {"chat": True, "as_json": False}
    found = {n: getattr(params, n) for n in params.__dataclass_fields__}
    assert found == found | {
        "max_tokens": 5, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 9,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "stop": ("xx", "yy"),
    }  # fmt: skip


def test_a_chat_uses_the_template(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def prompt(*more: str) -> str:
        assert run_command([str(toy), "-p", "ab", "--chat", "-n", "2", "--json", "-q", *more]) == 0
        return str(json.loads(capsys.readouterr().out)["prompt"])

    assert prompt() == "<|user|>ab<|end|><|assistant|>"
    assert prompt("--system", "hi") == "<|user|>hi<|end|><|user|>ab<|end|><|assistant|>"
    (tmp_path / "t.jinja").write_text("<|user|>{{ messages[0].content }}")
    assert prompt("--chat-template", str(tmp_path / "t.jinja")) == "<|user|>ab"


def test_the_default_length_is_cut_to_what_the_model_holds(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([str(toy), "-p", "abc", "--ignore-eos", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] == tiny.MAXLEN - 3


def test_the_default_length_is_cut_to_what_a_small_cache_holds(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [str(toy), "-p", "abc", "--ignore-eos", "--json", "-q", "--kv-cache-memory", "32"]
    assert run_command(small) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] == 2 * tiny.PAGE + 1 - 3
    assert run_command([*small, "-n", "20"]) == 1
    assert "LLMC-E604" in capsys.readouterr().err


# --- a talk in a terminal


def _default_signals() -> None:
    """A background job may have Ctrl-C ignored; a process in a terminal has not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()


@contextlib.contextmanager
def terminal_of(*args: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    master, slave = pty.openpty()
    process = start(*args, stdin=slave, stdout=slave, stderr=slave, preexec_fn=_default_signals)
    os.close(slave)
    try:
        yield master, process
    finally:
        process.kill()
        process.wait()
        os.close(master)


def until(master: int, words: str, seconds: float = 60) -> str:
    text, end = "", time.monotonic() + seconds
    while words not in text:
        ready, _, _ = select.select([master], [], [], max(0, end - time.monotonic()))
        assert ready, f"{words!r} never came; there is {text!r}"
        try:
            text += os.read(master, 4096).decode(errors="replace")
        except OSError:
            raise AssertionError(f"{words!r} never came; it ended with {text!r}") from None
    return text


def test_a_talk_remembers_and_forgets(toy: Path) -> None:
    with terminal_of(str(toy), "-n", "2", "--ignore-eos", "-v") as (master, process):
        assert "chat with the model" in until(master, ">>> ")
        os.write(master, b"ab\n")
        assert "5 prompt tokens" in until(master, ">>> ")
        os.write(master, b"cd\n")
        assert "13 prompt tokens" in until(master, ">>> ")
        os.write(master, b"/help\n")
        assert "/clear starts a new conversation" in until(master, ">>> ")
        os.write(master, b"/nonsense\n")
        assert "unknown command /nonsense; Ctrl-C" in until(master, ">>> ")
        os.write(master, b"/clear\n")
        until(master, ">>> ")
        os.write(master, b"ab\n")
        assert "5 prompt tokens" in until(master, ">>> ")
        os.write(master, b"a long line that the model cannot hold any more\n")
        assert "LLMC-E602" in until(master, ">>> ")
        os.write(master, b"\x04")
        assert process.wait(60) == 0


def test_ctrl_c_at_the_prompt_clears_the_line_and_ends_with_130_when_repeated(toy: Path) -> None:
    def interrupt(process: Any) -> None:
        time.sleep(0.3)  # readline loses a signal that comes between its prompt and its wait
        process.send_signal(signal.SIGINT)

    with terminal_of(str(toy), "-n", "2", "--ignore-eos", "-v") as (master, process):
        until(master, ">>> ")
        os.write(master, b"a line that is not sent")
        interrupt(process)
        assert "Ctrl-C again, or Ctrl-D, ends" in until(master, "session\r\n>>> ")
        os.write(master, b"ab\n")
        assert "5 prompt tokens" in until(master, "tok/s\r\n>>> ")
        interrupt(process)
        until(master, "session\r\n>>> ")
        interrupt(process)
        assert "Traceback" not in until(master, "interrupted")
        assert process.wait(60) == 130


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_one_final_newline_of_a_piped_prompt_is_not_part_of_it(end: str, toy: Path) -> None:
    code, out, _ = run(str(toy), "-n", "1", "--ignore-eos", "--json", stdin=f"abc{end}")
    assert code == 0 and json.loads(out)["prompt"] == "abc"


def test_ctrl_c_ends_an_answer_cleanly(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: interactive.Session, stream: Any, *, show: bool) -> str:
        next(iter(stream))
        raise KeyboardInterrupt

    monkeypatch.setattr(interactive.Session, "_write", interrupted)
    assert run_command([str(toy), "-p", "abc"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_an_answer_that_is_interrupted_is_part_of_the_talk(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = iter(["ab", "cd"])
    write = interactive.Session._write
    prompts = []

    def interrupted(self: interactive.Session, stream: Any, *, show: bool) -> str:
        prompts.append(stream.output.prompt)
        if len(prompts) == 1:
            sys.stdout.write(next(iter(stream)).text)
            raise KeyboardInterrupt
        return write(self, stream, show=show)

    def ask() -> str:
        try:
            return next(replies)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(interactive, "_read_line", ask)
    monkeypatch.setattr(interactive.Session, "_write", interrupted)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert run_command([str(toy), "-n", "2", "--ignore-eos"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert prompts[1] == f"<|user|>ab<|end|><|assistant|>{first.strip()}<|end|><|user|>cd<|end|><|assistant|>"


# --- exit codes


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["{toy}", "-p", "abc", "--temperature", "-1"], 1, "LLMC-E601: temperature"),
        (["{toy}", "-p", "abc", "-n", "0"], 1, "LLMC-E601: max_tokens"),
        (["{toy}", "-p", "abc", "-n", "1000"], 1, "LLMC-E603"),
        (["{toy}", "-p", "abc" * 20], 1, "LLMC-E602"),
        (["{toy}", "-p", ""], 1, "LLMC-E605"),
        (["{toy}", "-p", "abc", "--chat-template", "{{ x.y }}", "--chat"], 1, "LLMC-E633"),
        (["{toy}", "-p", "abc", "--chat-template", "mistyped.jinja", "--chat"], 1, "LLMC-E643"),
        (["{toy}", "-p", "abc", "--chat-template", "mistyped", "--chat"], 1, "LLMC-E630"),
        (["{toy}", "-p", "abc", "--chat-template", "{{ x }}"], 1, "LLMC-E643"),
        (["{toy}", "-p", "abc", "--kv-cache-memory", "1"], 1, "LLMC-E202"),
        (["{mute}", "-p", "abc"], 1, "LLMC-E620"),
        (["/nowhere", "-p", "abc"], 1, "LLMC-E101: there is no folder"),
        (["{empty}", "-p", "abc"], 1, "neither an artifact"),
        (["{model}", "-p", "abc"], 3, "llmc run MODEL"),
        (["{toy}", "-p", "abc", "--threads", "0"], 2, "at least 1"),
        (["{toy}", "-p", "abc", "--kv-cache-memory", "lots"], 2, "not a number of bytes"),
        (["{toy}", "--unknown"], 2, "unrecognized"),
        ([], 2, "ARTIFACT"),
    ],
)
def test_each_failure_has_its_exit_code_and_one_clear_message(
    toy: Path, mute: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, words: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    places = {"toy": toy, "mute": mute, "model": tmp_path / "model", "empty": tmp_path / "empty"}
    filled = [a.format(**places) if a.startswith("{") and a.endswith("}") and " " not in a else a for a in args]
    try:
        found = cli.main_run(filled)
    except SystemExit as e:
        found = int(e.code or 0)
    shown = capsys.readouterr()
    assert found == code, shown.err
    assert words in shown.err
    assert shown.out == ""
    assert "Traceback" not in shown.err


def test_a_damaged_artifact_is_reported(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    shutil.copytree(toy, tmp_path / "bad.llmc")
    file = tmp_path / "bad.llmc" / "tokenizer" / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b"a", b"b", 1))
    assert run_command([str(tmp_path / "bad.llmc"), "-p", "abc"]) == 1
    assert "LLMC-E1" in capsys.readouterr().err


def test_input_that_is_no_text_is_refused(toy: Path) -> None:
    process = start(str(toy), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.buffer.write(b"\xff\xfe")
    _, err = process.communicate()
    assert process.returncode == 1
    assert "not UTF-8" in err


def test_a_reader_that_goes_away_is_no_error(toy: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start(str(toy), "-p", "abc", "-q", stdout=write, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    os.close(write)
    _, err = process.communicate()
    assert "Traceback" not in err
    assert "Exception" not in err


def test_json_in_a_talk_is_refused(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert run_command([str(toy), "--json"]) == 1
    assert "--json needs a prompt" in capsys.readouterr().err


# --- small things


@pytest.mark.parametrize(
    ("text", "value"),
    [("1048576", 1 << 20), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1.5g", 3 << 29), ("64 kib", 64 << 10), ("7B", 7)],
)
def test_amounts_of_memory(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1G", "lots", "nan", "1e99", "5X", "G"])
def test_no_amounts_of_memory(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_bytes(text)


@pytest.mark.parametrize("command", ["main_run", "main_serve"])
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(command: str, flag: str) -> None:
    code = (
        "import sys; from llmc_runtime import cli\n"
        f"try: cli.{command}(['{flag}'])\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'tqdm', 'huggingface_hub', 'torch', 'transformers', 'llmc'}\n"
        "heavy |= {'llmc_runtime.artifact', 'llmc_runtime.format.manifest', 'llmc_runtime.format.program'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stderr.strip() == "[]"
    assert __version__ in done.stdout or flag == "--help"


def test_a_run_imports_neither_the_hub_nor_the_progress_bar(toy: Path) -> None:
    code = (
        "import sys; from llmc_runtime import cli\n"
        f"assert cli.main_run(['{toy}', '-p', 'abc', '-n', '2', '-q']) == 0\n"
        "heavy = {'huggingface_hub', 'torch', 'transformers', 'tqdm', 'jinja2', 'llmc', 'importlib.metadata'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stderr.strip() == "[]"


def test_the_version_is_that_of_the_distribution() -> None:
    import tomllib

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__
