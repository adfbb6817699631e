"""Starts the client processes of a load together, follows their progress, and collects their results."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from llmc_runtime.bench.messages import ClientResult, Plan, encode
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.python_command import module_command

_START_SECONDS = 0.2  # seconds between the start signal and the start
_MAX_LINE_BYTES = 1 << 30  # maximum bytes per line


async def run(
    plan: Plan, processes: int, show: Callable[[float, dict[str, list[int]]], None]
) -> tuple[float, ClientResult]:
    """Run the plan in `processes` processes. Return the start time (monotonic clock), and the result of all of them, in
    which `busy` is that of the busiest one.

    `show` is called with the elapsed seconds and the counts by mix, summed over the processes. Raises LlmcError E671.
    """
    clients = [await _start(i, processes) for i in range(processes)]
    try:
        _write(clients, encode(plan))
        await asyncio.gather(*map(_line, clients))  # every process reports that it is ready
        start = time.monotonic() + _START_SECONDS
        _write(clients, encode(start))
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
    return start, ClientResult(
        records=list(chain.from_iterable(result.records for result in results)),
        busy=max(result.busy for result in results),
        late=list(chain.from_iterable(result.late for result in results)),
    )


def _write(clients: Sequence[asyncio.subprocess.Process], line: str) -> None:
    """Write a line to the standard input of every process."""
    for client in clients:
        assert client.stdin is not None
        client.stdin.write(line.encode())


def _summed(parts: Sequence[Mapping[str, list[int]]]) -> dict[str, list[int]]:
    """Add up the counts of processes by mix; all processes have the same mixes."""
    return {name: list(map(sum, zip(*(part[name] for part in parts)))) for name in parts[0]}


async def _start(process: int, processes: int) -> asyncio.subprocess.Process:
    command = [*module_command("llmc_runtime.bench.client_process"), str(process), str(processes)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=_MAX_LINE_BYTES)


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
) -> ClientResult:
    """Read a process's messages until it has sent its result."""
    while "done" not in (message := await _line(client)):
        on_progress(process, message["progress"])
    return ClientResult.from_json(message["done"])
