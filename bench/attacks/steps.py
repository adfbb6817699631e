"""Times of the engine's steps during a window, by /admin/trace: what the server and the watching process add to them is
the rest of the inter-token latency.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bench.attacks.figures import gaps_of

_PATIENCE = 10.0  # seconds after the end of the recording until the server's response


class Recording:
    """Records the steps of the next `seconds`, at most 60, in a thread."""

    def __init__(self, host: str, port: int, admin_key: str, seconds: float) -> None:
        self._url = f"http://{host}:{port}/admin/trace?seconds={seconds:.3f}"
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._seconds = seconds
        self._result: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        request = urllib.request.Request(self._url, headers=self._headers)
        with urllib.request.urlopen(request, timeout=self._seconds + _PATIENCE) as reply:
            self._result = intervals(json.load(reply)["traceEvents"])

    def result(self) -> dict[str, Any]:
        """Return `intervals` of the recorded steps; {} if the recording failed."""
        self._thread.join(self._seconds + _PATIENCE)
        return self._result


def intervals(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return figures of the milliseconds between the ends of consecutive steps, of trace events.

    `all` has those of all steps, `decode` those of steps without prompts (a token a row); `prompts` is the number of
    the others.
    """
    steps = sorted((event["ts"] + event["dur"], event["args"]) for event in events if event["name"] == "step")
    every, decode = list[float](), list[float]()
    for (before, _), (end, args) in pairwise(steps):
        every.append((end - before) / 1e6)
        if args["tokens"] == args["rows"]:
            decode.append(every[-1])
    return {"all": gaps_of(every), "decode": gaps_of(decode), "prompts": len(every) - len(decode)}
