"""The parent's side of the client processes: starts them together, follows their progress, and collects their
records.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmc_runtime.bench.record import Record
from llmc_runtime.format.errors import LlmcError

_BOOT = (
    "import sys; sys.path[:] = sys.argv.pop(1).split(':'); "
    "from llmc_runtime.bench.client import main; sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))"
)
_AHEAD = 0.2  # seconds between the start signal and the start
_LINE = 1 << 30  # maximum bytes per line


@dataclass(frozen=True)
class Told:
    """The results of all client processes.

    `start` is the start time, `busy` the largest fraction of a core that a process used, and `late` the delays of the
    processes' event loops in seconds, one per measurement.
    """

    records: list[Record]
    start: float
    busy: float
    late: list[float]


async def run(plan: Mapping[str, Any], processes: int, show: Callable[[float, dict[str, list[int]]], None]) -> Told:
    """Run the plan in `processes` processes. Raises LlmcError E671.

    `show` is called with the elapsed seconds and the counts by mix, summed over the processes.
    """
    line = (json.dumps(plan) + "\n").encode()
    crew = [await _start(i, processes) for i in range(processes)]
    try:
        for one in crew:
            assert one.stdin is not None
            one.stdin.write(line)
        await asyncio.gather(*(_ready(one) for one in crew))
        start = time.monotonic() + _AHEAD
        for one in crew:
            assert one.stdin is not None
            one.stdin.write(f"{start!r}\n".encode())
        latest: dict[int, dict[str, list[int]]] = {}

        def heard(process: int, counts: dict[str, list[int]]) -> None:
            latest[process] = counts
            every = latest.values()
            summed = {name: [sum(column) for column in zip(*(one[name] for one in every))] for name in counts}
            show(time.monotonic() - start, summed)

        found = await asyncio.gather(*(_listen(i, one, heard) for i, one in enumerate(crew)))
    finally:
        for one in crew:
            if one.returncode is None:
                one.kill()
            await one.wait()
    late = [value for _, _, values in found for value in values]
    return Told([r for records, _, _ in found for r in records], start, max(busy for _, busy, _ in found), late)


async def _start(process: int, processes: int) -> asyncio.subprocess.Process:
    command = [sys.executable, "-P", "-c", _BOOT, ":".join(filter(None, sys.path)), str(process), str(processes)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=_LINE)


async def _line(one: asyncio.subprocess.Process) -> dict[str, Any]:
    assert one.stdout is not None
    line = await one.stdout.readline()
    if not line:
        raise LlmcError("E671", "a client process ended", "its messages are on stderr")
    told: dict[str, Any] = json.loads(line)
    if "failed" in told:
        raise LlmcError(
            "E671", f"the server cannot be measured: {told['failed']}", "see that it runs and has the model"
        )
    return told


async def _ready(one: asyncio.subprocess.Process) -> None:
    await _line(one)


async def _listen(
    process: int, one: asyncio.subprocess.Process, heard: Callable[[int, dict[str, list[int]]], None]
) -> tuple[list[Record], float, list[float]]:
    """Read a process's messages until it has sent its results."""
    while "done" not in (told := await _line(one)):
        heard(process, told["progress"])
    assert one.stdout is not None
    gaps = array("f", await one.stdout.readexactly(told["bytes"]))
    records, at = [], 0
    for row in told["done"]["records"]:
        count = row["gaps"]
        records.append(Record(**{**row, "gaps": gaps[at : at + count]}))
        at += count
    return records, told["done"]["busy"], told["done"]["late"]
