"""Names in the documentation exist: files, modules, flags, kernels, make targets. Its lines are short."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Set
from functools import cache

import pytest
from llmc_runtime.engine_args import EngineArgs
from llmc_runtime.option_type import options_of
from llmc_runtime.sched.sampling_params import PARAMETERS
from llmc_runtime.server.server_options import serve_options
from pages import DOCS, FENCE, ROOT

from llmc.extension import load
from llmc.options import Options

TEXTS = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "DEVELOPING.md"])
GROUPS = ("llmc.extensions", "llmc_runtime.call_formats")  # of entry points
# Flags of programs that are not ours: pip, lm-eval, docker, systemctl, kubectl, SGLang's router.
OTHER_FLAGS = frozenset(
    "--index-url --model --tasks --model_args --rm --read-only --tmpfs --now --from-file --gpus --build-arg --policy "
    "--worker-urls".split()
)


@cache
def tracked() -> tuple[str, ...]:
    """The paths of the repository's files."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return tuple(listed.stdout.split())


def is_file(name: str) -> bool:
    """Whether a file of the repository has this path, or a path with this end; `*` matches part of a name."""
    pattern = re.compile(rf"(.*/)?{re.escape(name)}".replace(r"\*", "[^/]*"))
    return any(pattern.fullmatch(path) for path in tracked())


def is_module(name: str) -> bool:
    """Whether a dotted name is a module or package, or a name in one."""
    inner, _, last = name.rpartition(".")
    for root in ("", "runtime/"):
        paths = [
            f"{root}{dotted.replace('.', '/')}{end}" for dotted in (name, inner) for end in (".py", "/__init__.py")
        ]
        if any(path in tracked() for path in paths[:2]):
            return True
        if any(path in tracked() and re.search(rf"\b{last}\b", (ROOT / path).read_text()) for path in paths[2:]):
            return True
    return False


def strange_names(text: str, flags: Set[str], kernels: Set[str]) -> Iterator[str]:
    """Files, modules, flags, kernels and make targets that a text names and that do not exist."""
    text = re.sub(r"\S*(?:HASH|NAME|\.llmc/)\S*|https?:\S+", "", text)
    files = re.findall(r"(?<![\w./-])((?:[\w*.-]+/)*[\w*-]+\.(?:py|h|cu|cuh|sh|toml))\b", text)
    yield from (f"file {x}" for x in files if not is_file(x))
    modules = re.findall(r"(?<![\w./-])((?:llmc|llmc_runtime|bench)(?:\.\w+)+)(?![\w/])", text)
    yield from (f"module {x}" for x in modules if x not in GROUPS and not is_module(x))
    yield from (f"flag {x}" for x in re.findall(r"(?<![\w-])(--[a-z][\w-]*\w)", text) if x not in flags)
    yield from (f"kernel {x}" for x in re.findall(r"`((?:cpu|triton|cuda)/\w+)`", text) if x not in kernels)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    typed = "\n".join([*(m[3] for m in FENCE.finditer(text)), *re.findall(r"`([^`\n]+)`", text)])
    yield from (f"make {x}" for x in re.findall(r"^make ([a-z][\w-]*)", typed, re.M) if x not in targets)


@cache
def known_flags() -> frozenset[str]:
    """The flags in the repository's programs (vLLM's among them), of declared options, and of other programs."""
    sources = [p for p in tracked() if not p.endswith(".md") and (ROOT / p).suffix in ("", ".py", ".sh", ".toml")]
    found = {x for p in sources for x in re.findall(r"--[a-z][\w-]*\w", (ROOT / p).read_text(errors="replace"))}
    for one in (*options_of(EngineArgs).values(), *serve_options().values(), *options_of(Options).values()):
        found |= {*one.spellings, *one.negations}
    return frozenset(found | {flag for one in PARAMETERS.values() for flag in one.flags} | OTHER_FLAGS)


def test_names_in_a_text_exist() -> None:
    kernels = frozenset(load().kernels)
    found = [f"{p.name}: {x}" for p in TEXTS for x in strange_names(p.read_text(), known_flags(), kernels)]
    assert not found, "\n".join(sorted(set(found)))
    flag = "-" * 2 + "flag-of-nothing"
    lies = f"`nowhere.py` llmc.passes.nothing `{flag}` `triton/none` `make nothing` `llmc/cli.py` `make test`"
    wrong = ["file nowhere.py", "module llmc.passes.nothing", f"flag {flag}", "kernel triton/none", "make nothing"]
    assert list(strange_names(lies, known_flags(), kernels)) == wrong


def test_lines_have_at_most_120_columns() -> None:
    """Except in tables, in blocks of code, and in the generated reference of the ops."""
    pages = [p for p in TEXTS if p.name != "ops.md"]
    lines = [(p.name, x) for p in pages for x in re.sub(FENCE, "", p.read_text()).splitlines()]
    assert not [f"{name}: {x}" for name, x in lines if len(x) > 120 and not x.startswith("|")]
