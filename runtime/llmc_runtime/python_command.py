"""The command that starts a module of this package in a new Python process."""

from __future__ import annotations

import json
import sys

# The child imports the package from where its parent found it, and never from the folder that it happens to start in.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from {module} import main; sys.exit(main(sys.argv[1:]))"
)


def module_command(module: str) -> list[str]:
    """The command that runs `main(argv)` of `module`; the caller appends the arguments."""
    return [sys.executable, "-P", "-c", _BOOT.format(module=module), json.dumps([*filter(None, sys.path)])]
