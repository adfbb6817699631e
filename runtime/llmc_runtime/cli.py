"""The commands llmc-run, llmc-serve, llmc bench and llmc collect-env. Modules are imported when they are used."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc_runtime import __version__
from llmc_runtime.command_parser import CommandParser
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format.errors import LlmcError, as_llmc_error
from llmc_runtime.format.install_command import install_command
from llmc_runtime.format.names import is_artifact
from llmc_runtime.format.text_file import read_text
from llmc_runtime.option_type import of_command, options_of

if TYPE_CHECKING:
    from llmc_runtime.api.llm import LLM
    from llmc_runtime.interactive import Session

_MAX_TEMPLATE = 1 << 20  # bytes of a file
OK, FAILED, USAGE, ENVIRONMENT, INTERRUPTED = 0, 1, 2, 3, 130


def main_run(argv: Sequence[str] | None = None) -> int:
    """Run the command `llmc-run`."""
    return run_command(sys.argv[1:] if argv is None else argv, compiles=False)


def main_serve(argv: Sequence[str] | None = None, prog: str = "llmc-serve") -> int:
    """Run `llmc-serve`: serve until a signal. Returns the exit code: 0, 1, 2 usage, 3 environment, 4, 130."""
    _open_standard_files()
    return _exit_code(lambda: _serve(sys.argv[1:] if argv is None else argv, prog), f"{prog}: interrupted")


def main_bench(argv: Sequence[str] | None = None) -> int:
    """Run the command `llmc bench`.

    Returns the exit code: 0, 1 error or failed requests, 2 usage, 3 environment, 130.
    """

    def bench() -> int:
        from llmc_runtime.bench.command import run

        return run(bench_parser().parse_args(argv), os.environ, sys.stdout, sys.stderr)

    return _exit_code(bench)


def main_collect_env(argv: Sequence[str] | None = None) -> int:
    """Run the command `llmc collect-env`. Returns the exit code: 0, 2 usage."""
    from llmc_runtime.collect_env import collect, render

    args = collect_env_parser().parse_args(argv)
    report = collect(os.environ)
    return _exit_code(lambda: _print(json.dumps(report, indent=2) if args.json else render(report)))


def run_command(argv: Sequence[str], prog: str = "llmc-run", *, compiles: bool = True) -> int:
    """Generate text from an artifact or, if it `compiles`, from a Hugging Face folder.

    The text is written to stdout, everything else to stderr. Returns the exit code: 0, 1 error, 2 usage, 3 environment,
    130.
    """
    _open_standard_files()
    args = parser(prog, compiles).parse_args(list(argv))
    return _exit_code(lambda: _run(args, compiles), f"\n{prog}: interrupted")


def _exit_code(work: Callable[[], int], interrupted: str = "") -> int:
    """Run a command and print its error. Returns its exit code, or that of the error."""
    try:
        return work()
    except KeyboardInterrupt:
        if interrupted:
            print(interrupted, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it
        _discard_output()
        return OK
    except Exception as e:
        error = as_llmc_error(e)
        print(error, file=sys.stderr)
        if error.code == "E644":
            _discard_output()
        of_compiler = error.code == "E641" and "LLMC-E5" in error.cause  # the compiler's error about this machine
        return ENVIRONMENT if error.of_environment or of_compiler else FAILED


@contextmanager
def _traceback(shown: bool) -> Iterator[None]:
    """Print the traceback of an error in the block, if `shown`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception:
        if shown:
            traceback.print_exc()
        raise


def _print(text: str) -> int:
    print(text, flush=True)
    return OK


def _serve(argv: Sequence[str], prog: str) -> int:
    from llmc_runtime.ignored_options import check_ignored
    from llmc_runtime.server.config import options_of as serve_options_of
    from llmc_runtime.server.config import read

    settings = read(argv, prog)
    args = settings.args
    with _traceback(args.log_level == "debug"):
        notes = check_ignored(args.ignored_flags)
        if args.print_config:
            return _print(settings.describe(args.json))
        options = serve_options_of(args, os.environ, _template(args.chat_template), notes)
        try:
            from llmc_runtime.server.run_server import serve

            if args.dry_run:  # only then the front end imports the engine
                from llmc_runtime.server.dry_run import render, report_of
        except ImportError as e:
            raise LlmcError("E665", f"the server needs a package: {e}", install_command("serve")) from None
        if not args.dry_run:
            return serve(options)
        report = report_of(options)
        for note in notes:
            print(f"llmc: {note}", file=sys.stderr)
        _print(json.dumps(report, indent=2) if args.json else render(report))
        return FAILED if report["fits"] is False else OK


def collect_env_parser() -> argparse.ArgumentParser:
    """Return the parser of `llmc collect-env`."""
    description = "Print information about this machine and installation for a bug report, without secrets and paths."
    result = CommandParser(prog="llmc collect-env", description=description)
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def bench_parser() -> argparse.ArgumentParser:
    """Return the parser of `llmc bench`."""
    from llmc_runtime.bench.command import parser

    return parser()


def _open_standard_files() -> None:
    """Open closed descriptors 0 to 2 as /dev/null, as a socket would take them otherwise.

    This includes sys.stderr: Python would print its messages on standard output.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)


def _discard_output() -> None:
    """Discard the rest of standard output, so that its last flush does not fail again."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser(prog: str, compiles: bool) -> argparse.ArgumentParser:
    """Return the parser of `llmc-run`, with the options of a compilation if the command `compiles`."""
    model = "an artifact"
    if compiles:
        model += ", or a Hugging Face folder or id owner/name (compiled on first use)"
    result = CommandParser(
        prog=prog,
        description=f"Generate text from {model}. Only the text goes to stdout. Without --prompt, standard input "
        "is the prompt; in a terminal, an interactive chat starts.",
    )
    add = result.add_argument
    add("model", metavar="MODEL" if compiles else "ARTIFACT", help=model)
    add("--version", action="version", version=f"{prog} {__version__}")
    add("-p", "--prompt", metavar="TEXT", help="prompt; with --chat, the user's message (default: standard input)")
    add("--chat", action="store_true", help="apply the model's chat template to the prompt")
    add("--system", metavar="TEXT", help="system message; implies --chat (default: none)")
    add("--json", action="store_true", help="print one JSON document with log-probabilities instead of streaming text")
    add("--embed", action="store_true", help="print the prompt's embedding, a JSON list, from a model that embeds")
    add("--classify", action="store_true", help="print the prompt's classes as JSON, from a model that classifies")
    add("--dimensions", type=int, metavar="N", help="with --embed: keep the first N numbers (all)")
    add("-v", "--verbose", action="store_true", help="print the duration of each stage, and tracebacks of errors")
    add("-q", "--quiet", action="store_true", help="print only errors on stderr")
    defaults = "the model's generation_config.json; at most 256 tokens, in a chat as many as fit"
    _add_sampling(result.add_argument_group(f"sampling (defaults: {defaults})"))
    _add_options(result.add_argument_group("resources"), "run")
    if compiles:
        _add_options(result.add_argument_group("compiling a Hugging Face folder"), "compile")
    return result


def _add_sampling(group: Any) -> None:
    from llmc_runtime.sched.sampling_params import PARAMETERS

    for parameter in PARAMETERS.values():
        if parameter.flags:
            more = parameter.values.argument or {}
            text = parameter.text + ("; may be repeated" if more.get("action") == "append" else "")
            group.add_argument(*parameter.flags, dest=parameter.name, default=None, help=text, **more)
    _add_options(group, "run", "chats and sampling")


def _add_options(group: Any, command: str, title: str = "engine") -> None:
    """Add the flags of the engine's options that are declared for a command."""
    for option in of_command(options_of(EngineOptions).values(), command):
        if option.group == title:
            option.add_to(group)


def _run(args: argparse.Namespace, compiles: bool) -> int:
    with _traceback(args.verbose):
        changed = _changed(args)
        prompt = _prompt(args)
        chat = args.chat or args.system is not None
        if prompt is not None and args.chat_template is not None and not chat:
            raise LlmcError("E643", "--chat-template has no effect on a plain prompt", "add --chat")
        session = _open(args, changed, compiles)
        try:
            if args.embed or args.classify:
                return _print(_pooled(args, session.llm, prompt))
            if prompt is None:
                return session.run_dialog()
            return session.answer(prompt, chat=chat, as_json=args.json)
        finally:
            if session.llm.trace is not None:
                session.llm.close()
                session.clock.say(session.llm.trace.describe())


def _pooled(args: argparse.Namespace, llm: LLM, prompt: str | None) -> str:
    """Return the embedding of a prompt, or its classification from labels to probabilities, as one line of JSON.

    With --json, the line is an object that also has the token ids. Raises LlmcError E643 without a prompt, and those of
    LLM.embed and LLM.classify.
    """
    from llmc_runtime.pooling_params import PoolingParams

    if prompt is None:
        raise LlmcError("E643", "--embed and --classify need a prompt", "pass --prompt TEXT, or pipe a prompt in")
    document: dict[str, Any]
    if args.classify:
        (classified,) = llm.classify(prompt, use_tqdm=False)
        probs = classified.outputs.probs
        labels = (llm.pooling.labels if llm.pooling is not None else ()) or map(str, range(len(probs)))
        document = {"probs": dict(zip(labels, probs)), "prompt_token_ids": classified.prompt_token_ids}
    else:
        (embedded,) = llm.embed(prompt, PoolingParams(args.dimensions), use_tqdm=False)
        document = {"embedding": embedded.outputs.embedding, "prompt_token_ids": embedded.prompt_token_ids}
    return json.dumps(document if args.json else document["probs" if args.classify else "embedding"])


def _prompt(args: argparse.Namespace) -> str | None:
    """Return the prompt, read from standard input if it is piped, without one final newline. None: an interactive chat.

    Raises LlmcError E643.
    """
    if sys.stdout is None or (args.prompt is None and sys.stdin is None):
        name = "output" if sys.stdout is None else "input"
        raise LlmcError("E643", f"standard {name} is closed", "pass --prompt TEXT, and keep standard output open")
    if args.prompt is not None:
        return str(args.prompt)
    if sys.stdin.isatty():
        if args.json:
            raise LlmcError("E643", "--json needs a prompt", "pass --prompt TEXT, or pipe a prompt in")
        return None
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as e:
        raise LlmcError("E643", f"standard input is not UTF-8 text ({e.reason} at byte {e.start})", "pipe text") from e


def _changed(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters on the command line, checked before anything is loaded."""
    from llmc_runtime.sched.sampling_params import PARAMETERS, SamplingParams

    values = {name: value for name in PARAMETERS if (value := getattr(args, name, None)) is not None}
    SamplingParams(**({"max_tokens": None} | values))
    return values


def _open(args: argparse.Namespace, changed: dict[str, Any], compiles: bool) -> Session:
    """Open the model of the command line; `changed`: the sampling parameters that it sets.

    With `compiles`, a folder or hub id is compiled first. Raises the errors of opening a model.
    """
    from llmc_runtime.interactive import Clock, Session

    if not compiles and not is_artifact(Path(args.model)):
        _refuse_sources(args.model)
    clock = Clock(args.verbose)
    from llmc_runtime.api.llm import LLM, to_stderr
    from llmc_runtime.defaults import described

    def say(line: str) -> None:
        if not args.quiet:
            to_stderr(line)

    clock.stage("imports")
    commands = ("run", "compile") if compiles else ("run",)
    declared = [option for name in commands for option in of_command(options_of(EngineOptions).values(), name)]
    options = {option.name: option.value(args) for option in declared}
    options["chat_template"] = _template(args.chat_template)
    if compiles and options["cache_dir"] is None:
        from llmc_runtime.compile_cache import default_root

        options["cache_dir"] = default_root(os.environ)
    seed = int.from_bytes(os.urandom(8), "little") if args.seed is None else 0
    llm = LLM(args.model, seed=seed, say=say, **options)
    if (line := described(llm.generation, args.generation_config, args.override_generation_config)) is not None:
        say(line)
    clock.stage("open")
    return Session(llm, changed, clock, system=args.system, quiet=args.quiet)


def _refuse_sources(model: str) -> None:
    """Raise LlmcError E640 if the model would have to be compiled."""
    from llmc_runtime.compile_cache import is_id, is_source

    folder = is_source(Path(model))
    if folder or is_id(model):
        raise LlmcError(
            "E640", f"{model} is a Hugging Face {'folder' if folder else 'id'}, not an artifact",
            "llmc run MODEL (compiles it), or llmc compile MODEL -o model.llmc, then llmc-run model.llmc",
        )  # fmt: skip


def _template(name: str | None) -> str | None:
    """Return the text of the file with this name, else the name itself, of one of the model's templates.

    Raises LlmcError E643 for a file that does not exist or cannot be read.
    """
    if name is None or "{{" in name or "{%" in name:
        return name
    if not os.path.exists(name) or os.path.isdir(name):
        if "/" in name or Path(name).suffix in (".jinja", ".jinja2", ".j2", ".txt", ".json"):
            raise LlmcError("E643", f"there is no file {name}", "check the path, or name a template of the model")
        return name
    try:
        return read_text(name, _MAX_TEMPLATE)
    except ValueError as e:
        raise LlmcError("E643", f"{name} cannot be read: {e}", "name a text file in UTF-8") from e


if __name__ == "__main__":
    sys.exit(main_run())
