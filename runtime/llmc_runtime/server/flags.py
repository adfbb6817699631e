"""The command line of `llmc-serve`, made of the declared options; it reads no file and starts nothing."""

from __future__ import annotations

import argparse

from llmc_runtime import __version__
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.option_type import Option, of_command, options_of
from llmc_runtime.server.http.listen import Tls
from llmc_runtime.server.ignored_flags import add_elsewhere
from llmc_runtime.server.server_options import Invocation, KeySources, Options

_GROUPS = ("configuration", "server", "keys and TLS", "load", "logs", "chats and sampling", "engine")


def serve_options() -> dict[str, Option]:
    """Every option by its name in the namespace of argparse, in the order of the help."""
    owners = (Invocation, Options, KeySources, Tls, EngineOptions)
    found = [one for owner in owners for one in of_command(options_of(owner).values(), "serve")]
    return {one.dest: one for one in sorted(found, key=lambda one: _GROUPS.index(one.group))}


def serve_parser(prog: str = "llmc-serve") -> argparse.ArgumentParser:
    """Every option, in groups. What is left open is None where it was parsed by `given.read`."""
    ap = argparse.ArgumentParser(
        prog=prog,
        description="Serve a model over HTTP, for OpenAI's clients. Needs: pip install 'llmc-aot[serve]'",
        allow_abbrev=False,
    )
    what = "an artifact, or a Hugging Face folder or id owner/name (compiled on first use)"
    ap.add_argument("model", metavar="MODEL", nargs="?", help=what)
    ap.add_argument("--version", action="version", version=f"{prog} {__version__}")
    groups = {title: ap.add_argument_group(title) for title in _GROUPS}
    for one in serve_options().values():
        one.add_to(groups[one.group])
    add_elsewhere(ap)
    return ap
