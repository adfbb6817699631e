"""llmc-run and llmc-serve: read arguments and the environment, call the API, print; heavy modules come when needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc_runtime import __version__
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format.errors import LlmcError, as_told
from llmc_runtime.option_type import of_command, options_of, parse_bytes

if TYPE_CHECKING:
    from llmc_runtime.interactive import Session
    from llmc_runtime.server.server_options import Options

OK, FAILED, USAGE, ENVIRONMENT, INTERRUPTED = 0, 1, 2, 3, 130


def main_run(argv: Sequence[str] | None = None) -> int:
    """The command `llmc-run`."""
    return run_command(sys.argv[1:] if argv is None else argv, compiles=False)


def main_serve(argv: Sequence[str] | None = None, prog: str = "llmc-serve") -> int:
    """The command `llmc-serve`: serves until a signal ends it. Answers the exit code: 0, 1, 2 usage, 3, 130."""
    verbose = False
    _open_standard_files()
    try:
        from llmc_runtime.server.config import options_of as served
        from llmc_runtime.server.config import read
        from llmc_runtime.server.ignored_flags import judge

        given = read(sys.argv[1:] if argv is None else argv, prog)
        verbose = given.args.log_level == "debug"
        notes = judge(given.args.elsewhere)
        if given.args.print_config:
            print(given.describe(given.args.json), flush=True)
            return OK
        options = served(given.args, os.environ, _template(given.args.chat_template), notes)
        if given.args.dry_run:
            return _dry_run(options, given.args.json)
        from llmc_runtime.server.run_server import serve

        return serve(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read what was printed has gone
        _forget_output()
        return OK
    except Exception as e:
        return _report(e, verbose)


def _dry_run(options: Options, as_json: bool) -> int:
    from llmc_runtime.server.dry_run import plan, render

    told = plan(options)
    for note in options.notes:
        print(f"llmc: {note}", file=sys.stderr)
    print(json.dumps(told, indent=2) if as_json else render(told), flush=True)
    return FAILED if told["fits"] is False else OK


def main_collect_env(argv: Sequence[str] | None = None) -> int:
    """The command `llmc collect-env`. Answers the exit code: 0, 2 usage."""
    ap = collect_env_parser()
    args = ap.parse_args(argv)
    from llmc_runtime.collect_env import collect, render

    found = collect(os.environ)
    try:
        print(json.dumps(found, indent=2) if args.json else render(found), flush=True)
    except BrokenPipeError:
        _forget_output()
    return OK


def collect_env_parser() -> argparse.ArgumentParser:
    """The options of `llmc collect-env`."""
    words = "tell what this machine and installation are, for a report of a problem: no secrets, no paths"
    ap = argparse.ArgumentParser(prog="llmc collect-env", description=words)
    ap.add_argument("--json", action="store_true", help="as JSON")
    return ap


def main_bench(argv: Sequence[str] | None = None) -> int:
    """The command `llmc bench`. Answers the exit code: 0, 1 error or failed requests, 2 usage, 3 environment, 130."""
    try:
        from llmc_runtime.bench.command import run

        args = bench_parser().parse_args(argv)
        return run(args, os.environ, sys.stdout, sys.stderr)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return OK
    except Exception as e:
        return _report(e, False)


def bench_parser() -> argparse.ArgumentParser:
    """The options of `llmc bench`."""
    from llmc_runtime.bench.command import parser

    return parser(parse_bytes)


def run_command(argv: Sequence[str], prog: str = "llmc-run", *, compiles: bool = True) -> int:
    """Generate text from an artifact or, where it `compiles`, from a Hugging Face folder.

    The text goes to stdout, everything else to stderr. Answers the exit code: 0, 1 error, 2 usage, 3 environment, 130.
    """
    _open_standard_files()
    args = parser(prog, compiles).parse_args(list(argv))
    try:
        return _run(args, compiles)
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        _forget_output()
        return OK
    except Exception as e:
        return _report(e, args.verbose)


def _report(e: Exception, verbose: bool) -> int:
    """Print the error. The exit code."""
    if verbose:
        import traceback

        traceback.print_exc()
    error = as_told(e)
    print(error, file=sys.stderr)
    if error.code == "E644":
        _forget_output()
    inner = error.code == "E641" and "LLMC-E5" in error.cause  # the compiler's own complaint about this machine
    return ENVIRONMENT if error.of_environment or inner else FAILED


def _open_standard_files() -> None:
    """Descriptors 0 to 2 that are closed lead nowhere: else a socket would be one of them. So does what is told on a
    closed standard error, which Python would print on standard output."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)


def _forget_output() -> None:
    """What standard output still holds goes nowhere, so that its last flush does not fail again."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser(prog: str, compiles: bool) -> argparse.ArgumentParser:
    """The options of `llmc-run`, and those of a compile where the command does that, too."""
    what = "an artifact"
    if compiles:
        what += ", or a Hugging Face folder or id owner/name (compiled on first use)"
    ap = argparse.ArgumentParser(
        prog=prog,
        description=f"Generate text from {what}. The text alone goes to stdout. Without --prompt, standard input is "
        "the prompt where it is piped; in a terminal, you talk with the model.",
    )
    ap.add_argument("model", metavar="MODEL" if compiles else "ARTIFACT", help=what)
    ap.add_argument("--version", action="version", version=f"{prog} {__version__}")
    ap.add_argument("-p", "--prompt", metavar="TEXT", help="what to continue, or with --chat what the user says")
    ap.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    ap.add_argument("--system", metavar="TEXT", help="the system message of a chat")
    ap.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document, with log-probabilities, instead of streaming text",
    )
    ap.add_argument("-v", "--verbose", action="store_true", help="say how long each stage took")
    ap.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors on stderr")
    defaults = "the model's generation_config.json; 256 tokens, in a chat as many as fit"
    _sampling(ap.add_argument_group(f"sampling (defaults: {defaults})"))
    _add(ap.add_argument_group("resources"), "run")
    if compiles:
        _add(ap.add_argument_group("compiling a Hugging Face folder"), "compile")
    return ap


def _sampling(group: Any) -> None:
    from llmc_runtime.sched.sampling_params import PARAMETERS

    for one in PARAMETERS.values():
        if one.flags:
            group.add_argument(*one.flags, dest=one.name, default=None, help=one.text, **one.values.argument or {})
    _add(group, "run", "chats and sampling")


def _add(group: Any, command: str, title: str = "engine") -> None:
    """The flags of the engine's options that are declared for a command."""
    for one in of_command(options_of(EngineOptions).values(), command):
        if one.group == title:
            one.add_to(group)


def _run(args: argparse.Namespace, compiles: bool) -> int:
    from llmc_runtime.interactive import Clock

    clock = Clock(args.verbose)
    given = _changed(args)
    prompt = args.prompt
    if sys.stdout is None or (prompt is None and sys.stdin is None):
        name = "output" if sys.stdout is None else "input"
        raise LlmcError("E643", f"standard {name} is closed", "give --prompt TEXT, and leave standard output open")
    interactive = prompt is None and sys.stdin.isatty()
    if interactive and args.json:
        raise LlmcError("E643", "--json needs a prompt", "give --prompt TEXT, or pipe one in")
    if prompt is None and not interactive:
        prompt = _piped()
    session = _open(args, given, compiles, clock)
    try:
        if prompt is None:
            return session.talk()
        return session.once(prompt, chat=args.chat or args.system is not None, as_json=args.json)
    finally:
        if session.llm.trace is not None:
            session.llm.close()
            clock.say(session.llm.trace.describe())


def _piped() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise LlmcError("E643", f"standard input is not UTF-8 text ({e.reason} at byte {e.start})", "pipe text") from e


def _changed(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters given on the command line, checked before anything is loaded."""
    from llmc_runtime.sched.sampling_params import PARAMETERS, SamplingParams

    given = {name: value for name in PARAMETERS if (value := getattr(args, name, None)) is not None}
    SamplingParams(**({"max_tokens": None} | given))
    return given


def _open(args: argparse.Namespace, given: dict[str, Any], compiles: bool, clock: Any) -> Session:
    from llmc_runtime.interactive import Session

    if not compiles and not (Path(args.model) / "manifest.json").is_file():
        _refuse_sources(args.model)
    from llmc_runtime.api.llm import LLM, to_stderr
    from llmc_runtime.defaults import described

    def say(line: str) -> None:
        if not args.quiet:
            to_stderr(line)

    clock.stage("imports")
    commands = ("run", "compile") if compiles else ("run",)
    known = [one for name in commands for one in of_command(options_of(EngineOptions).values(), name)]
    options = {one.name: one.value(args) for one in known}
    options["chat_template"] = _template(args.chat_template)
    if compiles and options["cache_dir"] is None:
        from llmc_runtime.compile_cache import default_root

        options["cache_dir"] = default_root(os.environ)
    seed = int.from_bytes(os.urandom(8), "little") if args.seed is None else 0
    llm = LLM(args.model, seed=seed, say=say, **options)
    choice = args.generation_config, args.override_generation_config
    if (line := described(llm.generation, *choice)) is not None:
        say(line)
    clock.stage("open")
    return Session(llm, given, clock, system=args.system, quiet=args.quiet)


def _refuse_sources(model: str) -> None:
    """LlmcError E640 where it is something that would have to be compiled."""
    from llmc_runtime.compile_cache import is_id

    folder = (Path(model) / "config.json").is_file()
    if folder or is_id(model):
        raise LlmcError(
            "E640", f"{model} is a Hugging Face {'folder' if folder else 'id'}, not an artifact",
            "llmc run MODEL (compiles it), or llmc compile MODEL -o model.llmc, then llmc-run model.llmc",
        )  # fmt: skip


def _template(given: str | None) -> str | None:
    """A file's text where there is such a file, else the name as it is."""
    if given is None or not Path(given).is_file():
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise LlmcError("E643", f"{given} cannot be read: {e}", "name a text file in UTF-8") from e


if __name__ == "__main__":
    sys.exit(main_run())
