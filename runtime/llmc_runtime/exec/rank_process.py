"""The process of a rank above 0: opens the artifact, and runs the steps that rank 0 sends.

`main([SOCKET, MEMORY, PARENT])`: the file descriptors of the socket pair and of the group's memory, and the process id
of rank 0, with which this process ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

from llmc_runtime.artifact import require_digest
from llmc_runtime.device.device import Member
from llmc_runtime.device.open_device import open_device
from llmc_runtime.exec.draft_artifact import open_with_draft
from llmc_runtime.exec.executor import Executor, Ticket, digest_of
from llmc_runtime.exec.rank_messages import (
    Call,
    Done,
    Failed,
    Guide,
    Join,
    Joined,
    Launch,
    Link,
    Meet,
    Prepare,
    Settled,
)
from llmc_runtime.format.errors import as_llmc_error
from llmc_runtime.heartbeat import RankHeartbeats
from llmc_runtime.python_command import unquoted

_POLL_SECONDS = 0.1  # seconds between two looks at the parent
_STEP_POLL_SECONDS = 5e-5  # seconds between two looks at a step in flight and at the link


def open_rank(join: Join, memory: int) -> Executor:
    """Open the artifact and make the executor of a rank.

    Raises LlmcError E118 if it is another artifact than that of rank 0, and the errors of opening one.
    """
    path, draft = (unquoted(name) for name in (join.path, join.draft))
    artifact = open_with_draft(path, draft or None, verify=join.verify, threads=join.threads, rank=join.rank)
    require_digest(artifact, join.digest, "rank 0 has opened")
    member = Member(join.rank, join.ranks, memory, join.limit)
    device = open_device(artifact, join.threads, index=join.engine, member=member)
    try:
        return Executor(artifact, device, join.kv_bytes, join.snapshots)
    except BaseException:
        device.close()
        raise


def serve(link: Link, executor: Executor) -> None:
    """Run the steps that rank 0 sends, until it closes the link."""
    tickets: deque[Ticket] = deque()  # one per step in flight
    while True:
        if tickets and tickets[0].second_half is None:
            if executor.done(tickets[0]):
                ticket = tickets.popleft()
                executor.wait(ticket)
                link.send(link.encode(Done(digest_of(ticket))))
                continue
            if not link.ready():
                time.sleep(_STEP_POLL_SECONDS)
                continue
        call = link.receive()
        if call is None:
            return
        if isinstance(call, Launch):
            tickets.append(executor.launch(call.step))
        elif isinstance(call, Guide):
            executor.guide(next(t for t in tickets if t.second_half is not None), call.masks)
        else:
            _answer(call, executor)
            tickets.clear()
            link.send(link.encode(Settled()))


def _answer(call: Call, executor: Executor) -> None:
    """Do what a call other than a step demands; steps in flight are discarded."""
    executor.settle()
    if isinstance(call, Meet):
        executor.device.connect(call.handles)
    elif isinstance(call, Prepare):
        executor.prepare()


def run(link: Link, memory: int) -> int:
    """Serve rank 0. Return the exit code."""
    cancel: Callable[[], None] | None = None
    try:
        join = link.receive()
        if not isinstance(join, Join):
            return 0
        RankHeartbeats(memory, join.rank).start()
        executor = open_rank(join, memory)
        cancel = executor.device.cancel
        link.send(link.encode(Joined(executor.device.group_handle)))
        serve(link, executor)
        return 0
    except Exception as e:
        if cancel is not None:
            cancel()  # the others must not wait for this rank
        error = as_llmc_error(e)
        if error.code == "E000":
            traceback.print_exc()
        link.send(link.encode(Failed(error.code, error.cause, error.remedy)))
        return 1


def end_with(parent: int) -> None:
    """End this process when its parent has ended, also while a step waits for it."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(0)


def main(argv: Sequence[str]) -> int:
    """Run the process with the arguments SOCKET MEMORY PARENT."""
    for number in (signal.SIGINT, signal.SIGTERM):  # handled by rank 0; a service manager signals all processes
        signal.signal(number, signal.SIG_IGN)
    descriptor, memory, parent = map(int, argv)
    threading.Thread(target=end_with, args=(parent,), name="llmc-parent", daemon=True).start()
    try:
        code = run(Link(socket.socket(fileno=descriptor), Call), memory)
    except OSError:  # rank 0 has closed the link
        code = 0
    sys.stderr.flush()
    os._exit(code)
