"""The `llmc` command line. Each command parses its arguments, calls one function and prints the result.

Everything beyond argparse is imported inside the command that uses it, so that `llmc --help` starts fast.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from llmc import __version__
from llmc.arguments import build_arguments, gib, hub_arguments, nbytes, positive

Command = Callable[[argparse.Namespace, IO[str]], int]
# These commands are implemented by `llmc_runtime`, which also declares their options.
OF_RUNTIME: Mapping[str, str] = MappingProxyType(
    {
        "run": "generate text from an artifact or a Hugging Face folder",
        "serve": "serve a model over HTTP, for OpenAI's clients",
        "bench": "measure a server, LLM.generate, a batch, a start",
        "collect-env": "tell what this machine and installation are",
    }
)


def main(argv: Sequence[str] | None = None, out: IO[str] | None = None) -> int:
    """Run one command and return its exit code.

    The codes are 0 (success), 1 (error), 2 (usage), 3 (environment), 4 (verification failed) and 130 (interrupted).
    """
    args_list = list(sys.argv[1:] if argv is None else argv)
    if args_list and args_list[0] in OF_RUNTIME:
        return _of_runtime(args_list[0], args_list[1:])
    args = _parser().parse_args(args_list)
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
    from llmc_runtime.format.errors import as_told

    if verbose:
        import traceback

        traceback.print_exc()
    error = as_told(e)
    print(error, file=sys.stderr)
    return 3 if error.of_environment else 1


def _parser() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(
        prog="llmc", description="Compile a Hugging Face language model ahead of time, and look into what came out."
    )
    ap.add_argument("--version", action="version", version=f"llmc {__version__}")
    sub = ap.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _compile_arguments(sub)
    for name, words in OF_RUNTIME.items():
        sub.add_parser(name, help=words, add_help=False)
    p = _command(sub, "completion", _completion, "print the script that completes llmc, llmc-run and llmc-serve")
    p.add_argument("shell", choices=("bash", "zsh", "fish"))
    _opt_arguments(sub)
    _look_arguments(sub)
    _artifact_arguments(sub)
    return ap


def _command(sub: Any, name: str, run: Command, summary: str) -> argparse.ArgumentParser:
    p: argparse.ArgumentParser = sub.add_parser(name, help=summary, description=summary)
    p.set_defaults(command=run)
    p.add_argument("-v", "--verbose", action="store_true", help="more detail, and a traceback with an error")
    return p


def _compile_arguments(sub: Any) -> None:
    p = _command(sub, "compile", _compile, "compile a Hugging Face folder into an artifact")
    p.add_argument(
        "model", help="a Hugging Face folder (config.json, tokenizer.json, *.safetensors), or owner/name@revision"
    )
    p.add_argument("-o", "--output", metavar="DIR", help="the artifact's folder, for example model.llmc")
    build_arguments(p)
    p.add_argument("--dry-run", action="store_true", help="tell memory, time and whether it fits; compile no kernel")
    p.add_argument("--memory", type=gib, metavar="GIB", help="of the device, for --dry-run: 80, or 512MiB")
    p.add_argument("--weights", default="packed", metavar="KIND", help="packed (default), random:SEED, or none")
    p.add_argument("--no-weights", action="store_const", const="none", dest="weights", help="for `llmc pack` later")
    p.add_argument("--force", action="store_true", help="replace an artifact that is there")
    p.add_argument(
        "--report", nargs="?", const=Path(), type=Path, metavar="FILE", help="write the build report (model.html), too"
    )
    p.add_argument("--json", action="store_true", help="print the summary as JSON on stdout")
    p.set_defaults(refuse=p.error)


def _opt_arguments(sub: Any) -> None:
    p = _command(sub, "opt", _opt, "run passes over a file of IR text, and print the result")
    p.add_argument("file", help="an .llir file, or - for standard input")
    p.add_argument("-p", "--passes", default="", help='passes in order: "canonicalize, fuse-norm{option=1}"')
    p.add_argument("--target", default="cpu:native", help="for passes that ask (cpu:native)")
    p.add_argument("--print-after", default="", metavar="NAME", help="print the text after this pass, or after all")
    p.add_argument("--stop-after", default="", metavar="NAME", help="run no pass behind this one")
    p.add_argument("--only", default="", metavar="LOC", help="make local rewrites under this module path alone")
    p.add_argument("--explain", action="store_true", help="print near misses: what almost matched, and why not")
    p.add_argument("--fuel", type=int, default=-1, metavar="N", help="make at most N changes (for bisection)")
    p.add_argument("--check", action="store_true", help="interpret before and after on drawn inputs, and compare")
    p.add_argument("--time", action="store_true", help="print the seconds and changes of every pass")


def _look_arguments(sub: Any) -> None:
    p = _command(sub, "ops", _ops, "print the op set")
    p.add_argument("names", nargs="*", help="ops to show in full (all, one a line)")
    p.add_argument("--json", action="store_true")
    p = _command(sub, "passes", _passes, "print the passes, their options and the pipelines")
    p.add_argument("--json", action="store_true")
    p = _command(sub, "roofline", _roofline, "price a model by flops and bytes, symbolically and at given sizes")
    p.add_argument("model", help="a Hugging Face folder, a config.json, or an .llir file")
    p.add_argument("--bind", default="T=1,R=1", metavar="S=N,...", help="sizes of the symbols (T=1,R=1)")
    p.add_argument("--target", default="cpu:native", help="whose peaks to divide by (cpu:native)")
    p.add_argument("--peak", type=float, metavar="FLOPS", help="flop/s instead of the target's")
    p.add_argument("--bandwidth", type=float, metavar="BYTES", help="byte/s instead of the target's")
    p.add_argument("--by", choices=("op", "node", "module"), default="op", help="one line an op kind, node or module")
    p.add_argument("--json", action="store_true")


def _artifact_arguments(sub: Any) -> None:
    p = _command(sub, "pack", _pack, "put a checkpoint's weights into an artifact that was compiled without them")
    p.add_argument("artifact")
    p.add_argument("checkpoint", help="the Hugging Face folder, or the id, that the artifact was compiled from")
    hub_arguments(p)
    _tune_arguments(sub)
    p = _command(sub, "inspect", _inspect, "show what is inside an artifact")
    p.add_argument("artifact")
    p.add_argument("--kv-cache-memory", metavar="BYTES", type=nbytes, help="size the KV pool for this much memory")
    p.add_argument("--kernels", type=int, default=5, metavar="N", help="show the N largest kernels of a program (5)")
    p.add_argument("--json", action="store_true")
    p = _command(sub, "diff", _diff, "tell what is different between two artifacts, or two stages of the IR")
    for name in ("a", "b"):
        p.add_argument(name, metavar=name.upper(), help="an artifact, ARTIFACT:STAGE (a pass's name), or an .llir file")
    p.add_argument("--all", action="store_true", help="print every line, however many there are")
    p.add_argument("--json", action="store_true")
    p = _command(sub, "report", _html, "write what a compile decided as one HTML file, for a browser")
    p.add_argument("artifact")
    p.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (model.llmc: model.html)")
    p = _command(sub, "verify", _verify, "recompute every hash of an artifact, and open it where this machine can")
    p.add_argument("artifact")
    p.add_argument("--record", action="store_true", help="run fixed prompts, and record what follows as its canary")
    p.add_argument("--canary", action="store_true", help="compare with the recorded canary, too")
    p.add_argument("--json", action="store_true")


def _tune_arguments(sub: Any) -> None:
    p = _command(sub, "tune", _tune, "measure the ways that kernels can run a model's nodes, on this machine")
    p.add_argument("source", nargs="?", help="an artifact, or a Hugging Face folder")
    p.add_argument("-o", "--output", default="tuning.jsonl", metavar="FILE", help="measurements (tuning.jsonl)")
    p.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="start nothing new after them (600)")
    p.add_argument("--context", type=positive, default=1024, metavar="N", help="tokens behind every row (1024)")
    p.add_argument("--kernels", default="", metavar="A,B", help="measure these kernels' ways alone")
    p.add_argument("--all", action="store_true", help="time nodes that can be run in one way alone, too")
    p.add_argument("--show", metavar="FILE", help="print the choices of such a file, and measure nothing")
    p.add_argument("--json", action="store_true", help="print the choices as JSON")
    build_arguments(p)
    p.set_defaults(weights="none", target="", refuse=p.error)


def _hub(args: argparse.Namespace) -> Any:
    from llmc.frontend.hub import Hub
    from llmc.frontend.unsupported import refuse_code

    if args.trust_remote_code:
        raise refuse_code("--trust-remote-code")
    return Hub(args.hub_endpoint, args.download_dir, args.offline)


def _options(args: argparse.Namespace) -> Any:
    from llmc.driver import Options

    return Options(
        target=args.target,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        tuning=args.tuning,
        max_num_batched_tokens=args.max_num_batched_tokens,
        pipeline=args.pipeline or "",
        layers=args.layers,
        cache=None if args.no_cache else (args.cache or default_cache()),
        reuse=not args.no_reuse,
        weights=args.weights,
        hub=_hub(args),
    )


def default_cache() -> Path:
    """Return the default cache folder: $XDG_CACHE_HOME/llmc, or ~/.cache/llmc."""
    from llmc_runtime.compile_cache import default_root

    return default_root(os.environ)


def _compile(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.driver import Console, compile_model

    if args.dry_run:
        return _dry_run(args, out)
    if not args.output:
        args.refuse("name the artifact's folder with -o, or ask for a plan with --dry-run")
    if args.memory is not None:
        args.refuse("--memory is for --dry-run")
    summary = compile_model(args.model, Path(args.output), _options(args), args.force, Console(sys.stderr))
    if args.report is not None:
        from llmc.report.html_report import write_report

        summary.facts["report"] = write_report(Path(args.output), args.report)
    if args.json:
        print(json.dumps(summary.as_json(), indent=2), file=out)
    else:
        print(summary.text(), file=sys.stderr)
    return 0


def _dry_run(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.console import Console
    from llmc.dry_run import dry_run, render

    plan = dry_run(args.model, _options(args), args.memory, Console(sys.stderr))
    print(json.dumps(plan, indent=2) if args.json else render(plan, args.argv), file=out)
    return 1 if plan["fits"] is False else 0


def _pack(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.driver import Console, pack_model

    pack_model(Path(args.artifact), args.checkpoint, Console(sys.stderr), _hub(args))
    return 0


def _of_runtime(name: str, argv: Sequence[str]) -> int:
    from llmc_runtime import cli

    if name == "run":
        return cli.run_command(argv, prog="llmc run")
    if name == "serve":
        return cli.main_serve(argv, prog="llmc serve")
    return cli.main_bench(argv) if name == "bench" else cli.main_collect_env(argv)


def _completion(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc_runtime import cli
    from llmc_runtime.server.server_options import serve_parser

    from llmc.completion import script

    parsers = {"llmc": _parser(), "llmc-run": cli.parser("llmc-run", False), "llmc-serve": serve_parser()}
    parsers |= {"llmc run": cli.parser("llmc run", True), "llmc serve": parsers["llmc-serve"]}
    parsers |= {"llmc bench": cli.bench_parser(), "llmc collect-env": cli.collect_env_parser()}
    print(script(args.shell, parsers), end="", file=out)
    return 0


def _opt(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.opt import main_opt

    return main_opt(args, out)


def _ops(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.listing import show_ops

    return show_ops(args.names, args.json, out)


def _passes(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.listing import show_passes

    return show_passes(args.json, out)


def _roofline(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.roofline import main_roofline

    return main_roofline(args, out)


def _inspect(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.artifact.inspect import inspect_artifact, render

    found = inspect_artifact(Path(args.artifact), kv_bytes=args.kv_cache_memory, kernels=args.kernels)
    print(json.dumps(found, indent=2) if args.json else render(found), file=out)
    return 0


def _diff(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.report.diff import diff, render

    found = diff(args.a, args.b)
    text = json.dumps(found, indent=2) if args.json else render(found, sys.maxsize if args.all else 60)
    print(text, file=out)
    return 0 if found["same"] else 1


def _html(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.report.html_report import write_report

    print(write_report(Path(args.artifact), args.output or Path()), file=out)
    return 0


def _tune(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.measure.tune import Settings, render, show, tune

    if not args.show and not args.source:
        args.refuse("name an artifact or a model to measure, or a file to --show")
    if not args.show:
        target, args.target = args.target, args.target or "cpu:native"
        options = _options(args)
        kernels = tuple(k.strip() for k in args.kernels.split(",") if k.strip())
        settings = Settings(args.limit, args.context, args.all, target, options.cache, say=_to_stderr, kernels=kernels)
        _to_stderr(tune(Path(args.source), Path(args.output), settings, options).text())
    found = show(Path(args.show or args.output))
    print(json.dumps(found, indent=2) if args.json else render(found), file=out)
    return 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _verify(args: argparse.Namespace, out: IO[str]) -> int:
    from llmc.measure.verify_artifact import render, verify_artifact

    found = verify_artifact(Path(args.artifact), record=args.record, canary=args.canary)
    print(json.dumps(found, indent=2) if args.json else render(found), file=out)
    return 0 if found["ok"] else 4


if __name__ == "__main__":
    sys.exit(main())
