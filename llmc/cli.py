"""The `llmc` command line. Each command parses its arguments, calls one function and prints the result.

Everything beyond argparse is imported inside the command that uses it, so that `llmc --help` starts fast.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

from llmc_runtime.command_parser import CommandParser
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.option_type import options_of, parse_bytes, positive, positive_number

from llmc import __version__, quantize_command
from llmc.measure import tune_command
from llmc.options import Options, add_hub_options, add_options, add_output, read_hub, read_options, read_output

if TYPE_CHECKING:
    from llmc.console import Console

Command = Callable[[argparse.Namespace, IO[str]], int]
# These commands are implemented by `llmc_runtime`, which also declares their options.
RUNTIME_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run": "generate text from an artifact or a Hugging Face folder",
        "serve": "serve a model over HTTP with an OpenAI-compatible API",
        "bench": "benchmark a server, LLM.generate, a batch of requests or the start-up",
        "collect-env": "print the versions and hardware of this machine",
    }
)


def main(argv: Sequence[str] | None = None, out: IO[str] | None = None) -> int:
    """Run one command and return its exit code.

    The codes are 0 (success), 1 (error), 2 (usage), 3 (environment), 4 (verification failed) and 130 (interrupted).
    """
    args_list = list(sys.argv[1:] if argv is None else argv)
    if args_list and args_list[0] in RUNTIME_COMMANDS:
        return _run_in_runtime(args_list[0], args_list[1:])
    parser = _parser()
    if not args_list:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(args_list)
    args.argv = args_list
    try:
        return int(args.command(args, out or sys.stdout))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:
        return _report(e, getattr(args, "verbose", False))


def _report(e: Exception, verbose: bool) -> int:
    from llmc_runtime.format.errors import as_llmc_error

    from llmc.console import erase_line

    erase_line(sys.stderr)
    if verbose:
        import traceback

        traceback.print_exc()
    error = as_llmc_error(e)
    if error.code == "E000":
        from llmc.extension import extension_at_fault

        error = extension_at_fault(e) or error
    print(error, file=sys.stderr)
    return 3 if error.of_environment else 1


def _parser() -> argparse.ArgumentParser:
    ap = CommandParser(
        prog="llmc", description="Compile Hugging Face language models ahead of time, and inspect the artifacts."
    )
    ap.add_argument("--version", action="version", version=f"llmc {__version__}")
    sub = ap.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _compile_arguments(sub)
    summary = "write a quantised checkpoint in the compressed-tensors format"
    quantize_command.add_arguments(_command(sub, "quantize", _quantize, summary, as_json=True))
    for name, summary in RUNTIME_COMMANDS.items():
        sub.add_parser(name, help=summary, add_help=False)
    p = _command(sub, "completion", _completion, "print the shell completion of llmc, llmc-run and llmc-serve")
    p.add_argument("shell", choices=("bash", "zsh", "fish"))
    _ir_arguments(sub)
    _model_arguments(sub)
    _artifact_arguments(sub)
    p = _command(sub, "help", _help, "print the help of a command")
    p.add_argument("about", nargs="?", choices=tuple(sub.choices), metavar="COMMAND", help="command (all)")
    return ap


def _command(sub: Any, name: str, run: Command | str, summary: str, as_json: bool = False) -> CommandParser:
    """Add a command that calls `run`, a function or a "module:function" text to import; `as_json` adds --json."""
    p: CommandParser = sub.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    p.set_defaults(command=_imported(run) if isinstance(run, str) else run, usage_error=p.error)
    p.add_argument("-v", "--verbose", action="store_true", help="print more detail, and the traceback of an error")
    if as_json:
        p.add_argument("--json", action="store_true", help="print JSON on stdout instead of text")
    return p


def _imported(name: str) -> Command:
    def run(args: argparse.Namespace, out: IO[str]) -> int:
        module, _, function = name.partition(":")
        return int(getattr(importlib.import_module(module), function)(args, out))

    return run


def _compile_arguments(sub: Any) -> None:
    p = _command(sub, "compile", _compile, "compile a Hugging Face folder into an artifact", as_json=True)
    p.add_argument(
        "model", help="Hugging Face folder (config.json, tokenizer.json, *.safetensors), or owner/name@revision"
    )
    add_output(p, "folder of the artifact, for example model.llmc")
    add_options(p, "compile")
    p.add_argument("--dry-run", action="store_true", help="print the predicted memory and time; compile no kernel")
    p.add_argument("--memory", type=_gib, metavar="GIB", help="device memory for --dry-run, for example 80 or 512MiB")
    p.add_argument("--no-weights", action="store_const", const="none", dest="weights", help="same as --weights none")
    p.add_argument("--force", action="store_true", help="replace an existing artifact")
    page = "also write the build report, an HTML file (model.html)"
    p.add_argument("--report", nargs="?", const=Path(), type=Path, metavar="FILE", help=page)


def _ir_arguments(sub: Any) -> None:
    p = _command(sub, "opt", "llmc.opt:main_opt", "run passes over a file of IR text, and print the result")
    p.add_argument("file", help=".llir file, or - for standard input")
    p.add_argument("-p", "--passes", default="", help='passes in order: "canonicalize, fuse-norm{option=1}"')
    p.add_argument("--target", default="cpu:native", help="target of passes that depend on one (cpu:native)")
    p.add_argument("--print-after", default="", metavar="NAME", help="pass after which to print the IR, or all (none)")
    p.add_argument("--stop-after", default="", metavar="NAME", help="last pass to run (the pipeline's last)")
    p.add_argument("--only", default="", metavar="LOC", help="module path to which local rewrites are restricted (all)")
    explain = "print near misses with their reasons, and the kernels that select chose and rejected"
    p.add_argument("--explain", action="store_true", help=explain)
    p.add_argument("--fuel", type=int, default=-1, metavar="N", help="maximum number of changes, to bisect (no limit)")
    check = "interpret the graphs before and after in float64 on random inputs, and compare the results"
    p.add_argument("--check", action="store_true", help=check)
    rounded = "like --check, and also compare the rounding errors if every op's result is rounded to its dtype"
    p.add_argument("--rounded", action="store_true", help=rounded)
    p.add_argument("--time", action="store_true", help="print the milliseconds and changes of every pass")
    p = _command(sub, "ops", "llmc.listing:main_ops", "print the ops", as_json=True)
    p.add_argument("names", nargs="*", help="ops to print in full (all, one per line)")
    p = _command(sub, "passes", "llmc.listing:main_passes", "print the passes and pipelines", as_json=True)
    p.add_argument("names", nargs="*", help="passes to print in full (all, one per line, and the pipelines)")


def _model_arguments(sub: Any) -> None:
    summary = "print the predicted cost of a model, symbolically and at given sizes"
    p = _command(sub, "roofline", "llmc.roofline:main_roofline", summary, as_json=True)
    p.add_argument("model", help="Hugging Face folder, config.json, or .llir file")
    p.add_argument(
        "--bind",
        default="T=1,R=1",
        metavar="S=N,...",
        help="sizes of the symbols, such as T tokens and R rows (T=1,R=1)",
    )
    p.add_argument("--target", default="cpu:native", help="target whose peak rates are used (cpu:native)")
    p.add_argument("--peak", type=positive_number, metavar="FLOPS", help="peak rate in flop/s (the target's)")
    p.add_argument("--bandwidth", type=positive_number, metavar="BYTES", help="memory bandwidth in B/s (the target's)")
    p.add_argument(
        "--by", choices=("op", "node", "module"), default="op", help="grouping of the lines of the table (op)"
    )
    tune_command.add_arguments(
        _command(sub, "tune", _tune, "measure a model's candidate kernels on this machine", as_json=True)
    )


def _artifact_arguments(sub: Any) -> None:
    p = _command(sub, "pack", _pack, "put a checkpoint's weights into an artifact that was compiled without them")
    p.add_argument("artifact", help="folder of the artifact")
    p.add_argument("checkpoint", help="Hugging Face folder or hub id that the artifact was compiled from")
    add_hub_options(p)
    p = _command(sub, "inspect", _inspect, "print the contents of an artifact", as_json=True)
    p.add_argument("artifact", help="folder of the artifact")
    memory = "memory of the KV pool, for example 8GiB (all rows at full length)"
    flags = options_of(EngineOptions)["kv_cache_memory_bytes"].spellings
    p.add_argument(*flags, dest="kv_cache_memory", metavar="BYTES", type=parse_bytes, help=memory)
    p.add_argument("--kernels", type=int, default=5, metavar="N", help="number of kernels to print per program (5)")
    p = _command(sub, "diff", _diff, "print the differences of two artifacts, or of two stages of the IR", as_json=True)
    for name in ("a", "b"):
        p.add_argument(name, metavar=name.upper(), help="artifact, ARTIFACT:STAGE (the name of a pass), or .llir file")
    p.add_argument("--all", action="store_true", help="print all lines (60 per section)")
    p = _command(sub, "report", _html, "write the build report of an artifact as one HTML file")
    p.add_argument("artifact", help="folder of the artifact")
    p.add_argument("-o", "--output", type=Path, metavar="FILE", help="HTML file (model.llmc: model.html)")
    summary = "check an artifact's hashes, and open it if this machine can run it"
    p = _command(sub, "verify", _verify, summary, as_json=True)
    p.add_argument("artifact", help="folder of the artifact")
    p.add_argument("--record", action="store_true", help="run fixed prompts, and record the results as the canary")
    p.add_argument("--canary", action="store_true", help="also compare with the recorded canary")
    summary = "measure perplexity on a text, and agreement with the unquantised model"
    p = _command(sub, "eval", _eval, summary, as_json=True)
    p.add_argument("artifact", help="folder of the artifact")
    p.add_argument("text", type=Path, help="UTF-8 text file, or JSON lines with a field text")
    reference = "unquantised model to compare with: an artifact, or a folder or hub id that is compiled first"
    p.add_argument("--against", default="", metavar="PATH", help=reference)
    context = "tokens in a window (512, or the artifact's max_model_len if that is smaller)"
    p.add_argument("--context", type=positive, metavar="N", help=context)
    p.add_argument("--limit", type=positive, metavar="TOKENS", help="maximum number of tokens to score (whole text)")
    p.add_argument("--record", action="store_true", help="write the result into the artifact")


def _print(result: Any, as_json: bool, render: Callable[[Any], str], out: IO[str]) -> None:
    """Print a command's data as JSON, or as the text that `render` makes of it."""
    from llmc.console import erase_line

    erase_line(sys.stderr)
    print(json.dumps(result, indent=2) if as_json else render(result), file=out)


def _gib(text: str) -> int:
    """Parse a size in bytes; a number without a unit is in GiB."""
    return parse_bytes(f"{text}GiB" if text.replace(".", "", 1).isdigit() else text)


def _options(args: argparse.Namespace) -> Options:
    from llmc_runtime.compile_cache import default_root

    return read_options(args, default_root(os.environ))


def _begun(stage: str, detail: str) -> Console:
    """Return the console of a command, on which its first stage is announced before slow modules are imported."""
    from llmc.console import Console

    console = Console(sys.stderr)
    console.begin(stage, detail)
    return console


def _compile(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.console import Console
    from llmc.driver import compile_model

    output = read_output(args)
    if args.dry_run:
        return _dry_run(args, out)
    if not output:
        args.usage_error("give the artifact's folder with -o, or --dry-run")
    if args.memory is not None:
        args.usage_error("--memory needs --dry-run")
    summary = compile_model(args.model, Path(output), _options(args), args.force, Console(sys.stderr))
    if args.report is not None:
        from llmc.report.html_report import write_report

        summary.facts["report"] = write_report(Path(output), args.report)
    if args.json:
        print(json.dumps(summary.as_json(), indent=2), file=out)
    else:
        print(summary.text(), file=sys.stderr)
    return 0


def _dry_run(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.console import Console
    from llmc.dry_run import dry_run, render

    plan = dry_run(args.model, _options(args), args.memory, Console(sys.stderr))
    _print(plan, args.json, lambda p: render(p, args.argv), out)
    return 1 if plan["fits"] is False else 0


def _pack(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc_runtime.format.errors import require_compiler

    from llmc.pack import pack_model

    require_compiler()
    pack_model(Path(args.artifact), args.checkpoint, _begun("pack", args.artifact), read_hub(args))
    return 0


def _quantize(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc_runtime.format.errors import require_compiler

    output = read_output(args)
    if not output:
        args.usage_error("give the folder of the quantised checkpoint, as OUTPUT or with -o")
    require_compiler()
    console = _begun("quantize", args.model)
    from llmc.quant.make.quantize_model import quantize_model

    written = quantize_model(args.model, Path(output), quantize_command.settings_of(args), console, read_hub(args))
    _print(written.as_json(), args.json, lambda _: written.text(), out)
    return 0


def _run_in_runtime(name: str, argv: Sequence[str]) -> int:
    from llmc_runtime import cli

    if name == "run":
        return cli.run_command(argv, prog="llmc run")
    if name == "serve":
        return cli.main_serve(argv, prog="llmc serve")
    return cli.main_bench(argv) if name == "bench" else cli.main_collect_env(argv)


def _help(args: argparse.Namespace, out: IO[str]) -> int:
    return main([*([args.about] if args.about else []), "--help"], out)


def _completion(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc_runtime import cli
    from llmc_runtime.server.server_options import serve_parser

    from llmc.completion import script

    parsers = {"llmc": _parser(), "llmc-run": cli.parser("llmc-run", False), "llmc-serve": serve_parser()}
    parsers |= {"llmc run": cli.parser("llmc run", True), "llmc serve": parsers["llmc-serve"]}
    parsers |= {"llmc bench": cli.bench_parser(), "llmc collect-env": cli.collect_env_parser()}
    print(script(args.shell, parsers), end="", file=out)
    return 0


def _inspect(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.report.inspect import inspect_artifact, render

    result = inspect_artifact(Path(args.artifact), kv_bytes=args.kv_cache_memory, kernels=args.kernels)
    _print(result, args.json, render, out)
    return 0


def _diff(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.report.diff import diff, render

    result = diff(args.a, args.b)
    _print(result, args.json, lambda f: render(f, sys.maxsize if args.all else 60), out)
    return 0 if result["same"] else 1


def _html(args: argparse.Namespace, out: IO[str]) -> int:
    _begun("report", args.artifact)
    from llmc.report.html_report import write_report

    print(write_report(Path(args.artifact), args.output or Path()), file=out)
    return 0


def _tune(args: argparse.Namespace, out: IO[str]) -> int:
    target, args.target = args.target, args.target or "cpu:native"
    return tune_command.run(args, _options(args), target, out)


def _verify(args: argparse.Namespace, out: IO[str]) -> int:
    _begun("verify", args.artifact)
    from llmc.measure.verify_artifact import render, verify_artifact

    result = verify_artifact(Path(args.artifact), record=args.record, canary=args.canary)
    _print(result, args.json, render, out)
    return 0 if result["ok"] else 4


def _eval(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc_runtime.compile_cache import default_root

    console = _begun("eval", args.artifact)
    from llmc.measure.eval_artifact import Settings, eval_artifact, render

    settings = Settings(default_root(os.environ), args.against, args.context, args.limit, args.record)
    result = eval_artifact(Path(args.artifact), args.text, settings, console)
    _print(result, args.json, render, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
