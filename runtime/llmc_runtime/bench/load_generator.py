"""The parent's side of the client processes: starts them together, follows their progress, and collects their
records.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
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
class ClientResults:
    """The results of all client processes.

    `start` is the start time, `busy` the largest fraction of a core that a process used, and `late` the delays of the
    processes' event loops in seconds, one per measurement.
    """

    records: list[Record]
    start: float
    busy: float
    late: list[float]


async def run(
    plan: Mapping[str, Any], processes: int, show: Callable[[float, dict[str, list[int]]], None]
) -> ClientResults:
    """Run the plan in `processes` processes. Raises LlmcError E671.

    `show` is called with the elapsed seconds and the counts by mix, summed over the processes.
    """
    clients = [await _start(i, processes) for i in range(processes)]
    try:
        _write(clients, json.dumps(plan))
        await asyncio.gather(*map(_line, clients))  # every process reports that it is ready
        start = time.monotonic() + _AHEAD
        _write(clients, repr(start))
        counts_by_process: dict[int, dict[str, list[int]]] = {}

        def on_progress(process: int, counts: dict[str, list[int]]) -> None:
            counts_by_process[process] = counts
            show(time.monotonic() - start, _summed(list(counts_by_process.values())))

        results = await asyncio.gather(*(_listen(i, client, on_progress) for i, client in enumerate(clients)))
    finally:
        for client in clients:
            if client.returncode is None:
                client.kill()
            await client.wait()
    return ClientResults(
        records=[record for records, _, _ in results for record in records],
        start=start,
        busy=max(busy for _, busy, _ in results),
        late=[seconds for _, _, late in results for seconds in late],
    )


def _write(clients: Sequence[asyncio.subprocess.Process], line: str) -> None:
    """Write a line to the standard input of every process."""
    for client in clients:
        assert client.stdin is not None
        client.stdin.write(f"{line}\n".encode())


def _summed(parts: Sequence[Mapping[str, list[int]]]) -> dict[str, list[int]]:
    """Add up the counts of processes by mix; all processes have the same mixes."""
    return {mix: [sum(column) for column in zip(*(part[mix] for part in parts))] for mix in parts[0]}


async def _start(process: int, processes: int) -> asyncio.subprocess.Process:
    command = [sys.executable, "-P", "-c", _BOOT, ":".join(filter(None, sys.path)), str(process), str(processes)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=_LINE)


async def _line(client: asyncio.subprocess.Process) -> dict[str, Any]:
    assert client.stdout is not None
    line = await client.stdout.readline()
    if not line:
        raise LlmcError("E671", "a client process ended unexpectedly", "see its messages on stderr")
    message: dict[str, Any] = json.loads(line)
    if "failed" in message:
        raise LlmcError(
            "E671", f"the server cannot be measured: {message['failed']}", "check that it runs and serves the model"
        )
    return message


async def _listen(
    process: int, client: asyncio.subprocess.Process, on_progress: Callable[[int, dict[str, list[int]]], None]
) -> tuple[list[Record], float, list[float]]:
    """Read a process's messages until it has sent its results."""
    while "done" not in (message := await _line(client)):
        on_progress(process, message["progress"])
    assert client.stdout is not None
    gaps = array("f", await client.stdout.readexactly(message["bytes"]))
    records, at = [], 0
    for row in message["done"]["records"]:
        count = row["gaps"]
        records.append(Record(**{**row, "gaps": gaps[at : at + count]}))
        at += count
    return records, message["done"]["busy"], message["done"]["late"]
