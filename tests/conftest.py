"""Every tests/**/*.llir file is a test: its RUN lines run in this process, its CHECK lines are compared with their
output, and the output of passes is interpreted and compared with the file."""

from __future__ import annotations

import gc
import io
import re
import shlex
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from draw import SEED, SLOW, drawn, left_out, seed_test
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser
from hypothesis import HealthCheck, settings

RUN = re.compile(r"^// RUN: (.*)$", re.M)

# Examples may take any time: on a busy machine, time limits would fail tests that have found nothing.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

SHARE = 0.02
FREEZE, UNFREEZE = gc.freeze, gc.unfreeze


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", action="store_true", help="all tests marked `drawn` or `slow`, not only those that SEED draws"
    )
    share = f"share of the tests marked `drawn` to run ({SHARE}), and {SLOW} times this of those marked `slow`"
    parser.addoption("--share", type=float, default=SHARE, metavar="X", help=share)
    parser.addoption("--kills", type=int, default=3, metavar="N", help="how often ranks under load are killed (3)")


def pytest_configure() -> None:
    """Servers under test take SIGHUP and SIGINT as they would from a shell, also if the tests themselves run under
    nohup or in the background of a script."""
    for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_report_header() -> str:
    return f"SEED={SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Pause the garbage collector, which would search the growing list of tests several times (a fifth of the time of a
    collection), and exclude tests and modules from later searches.

    LLM collects garbage when it opens and freezes the heap until it is closed. Here this would take a second for each
    LLM and include tests and modules again, so that only the fixture `freezes` lets it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        FREEZE()
        gc.freeze = gc.unfreeze = lambda: None
        gc.enable()


@pytest.fixture
def freezes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `gc.freeze` and `gc.unfreeze` do their work during a test."""
    UNFREEZE()
    monkeypatch.setattr(gc, "freeze", FREEZE)
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    yield
    gc.collect()
    FREEZE()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    seed_test()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are one of many of a kind, or slow, are drawn; slow ones of a file that is named on the command line
    all run, and so does everything that is named by its node id."""
    full = config.getoption("--attacks", "sample") == "full"
    if full or config.getoption("--every") or any("::" in arg for arg in config.args):
        return
    named = any(arg.endswith(".py") for arg in config.args)
    names = [drawn(item, config.getoption("--share"), named) for item in items]
    equal: defaultdict[float, set[str]] = defaultdict(set)
    for name, chance in names:
        equal[chance].add(name)
    out = set[str]().union(*(left_out([*names], chance) for chance, names in equal.items()))
    config.hook.pytest_deselected(items=[item for item, (name, _) in zip(items, names, strict=True) if name in out])
    items[:] = [item for item, (name, _) in zip(items, names, strict=True) if name not in out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report skipped shares of tests, also with -q; otherwise a sampled file would look completely tested."""
    count = len(terminalreporter.stats.get("deselected", ()))
    if count and not (config.getoption("keyword") or config.getoption("markexpr")):
        marks = "marked `drawn` or `slow`"
        terminalreporter.write_line(f"{count} tests {marks} were left out at random (SEED={SEED}); all: --every")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return LlirFile.from_parent(parent, path=file_path) if file_path.suffix == ".llir" else None


class LlirFile(pytest.File):
    """One text test; each RUN line is an item."""

    def collect(self) -> Iterator[pytest.Item]:
        runs = RUN.findall(self.path.read_text())
        if not runs:
            raise ValueError(f"{self.path} has no RUN line")
        for i, run in enumerate(runs):
            yield LlirItem.from_parent(self, name=f"run{i}", run=run)


class LlirItem(pytest.Item):
    """`llmc opt %s ... | filecheck %s [--check-prefix P]`, in process. `not llmc ...` expects an error, whose text is
    checked. A run that succeeds is numeric, too: `--rounded` is added to it, unless the line says `--no-check` (of
    values that the interpreter cannot hold)."""

    def __init__(self, *, run: str, **kw: object) -> None:
        super().__init__(**kw)  # type: ignore[arg-type]
        self.run = run

    def runtest(self) -> None:
        command, _, check = self.run.partition("|")
        words = [str(self.path) if w == "%s" else w for w in shlex.split(command)]
        fails = words[0] == "not"
        text = outcome(words[2:] if fails else words[1:], fails)
        prefix = m[1] if (m := re.search(r"--check-prefix[= ](\S+)", check)) else "CHECK"
        options = Options(match_filename=str(self.path), check_prefixes=[prefix])
        if Matcher(options, FInput("<output>", text), Parser.from_opts(options)).run():
            raise AssertionError(f"filecheck ({prefix}) failed; the output was:\n{text}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        """Return only the message, since the traceback of a text test is not useful."""
        plain = isinstance(excinfo.value, AssertionError)
        return str(excinfo.value) if plain else str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{self.path.name}: {self.run}"


def outcome(argv: list[str], fails: bool) -> str:
    """Return the command's output, or the text of an expected error."""
    from llmc.cli import _parser
    from llmc.diagnostics import LlmcError

    out = io.StringIO()
    args = _parser().parse_args([w for w in argv if w != "--no-check"])
    if argv[0] == "opt" and not fails and "--no-check" not in argv:
        args.check = args.rounded = True
    try:
        args.command(args, out)
    except LlmcError as e:
        if fails:
            return f"{out.getvalue()}error: {e}\n"
        raise
    assert not fails, f"an error was expected; the output was:\n{out.getvalue()}"
    return out.getvalue()
