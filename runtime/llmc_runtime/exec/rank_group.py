"""The processes of the ranks above 0, as rank 0 sees them: starting, calling, watching and ending them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import quote_from_bytes

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.device import Member, group_ended
from llmc_runtime.exec.rank_messages import Call, Done, Failed, Join, Joined, Link, Reply, Settle, Settled
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.host_info import default_threads
from llmc_runtime.python_command import LinkedProcess, memory_file, module_command

LIMIT = 300.0  # seconds that ranks wait for each other, as long as a step on a CPU may take
_REPORT = 0.5  # seconds for the report of a rank that has failed


class RankProcess(LinkedProcess):
    """The process of one rank. Raises LlmcError E100 if it cannot be created."""

    def __init__(self, rank: int, memory: int, limit: float) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(limit)
        self.rank, self.link, self._at_end = rank, Link(ours, Reply), False
        with theirs:
            descriptors = [theirs.fileno(), memory]
            command = [*module_command("llmc_runtime.exec.rank_process"), *map(str, descriptors), str(os.getpid())]
            try:
                super().__init__(ours, command, descriptors)
            except OSError as e:
                cause = f"the system cannot create a process for rank {rank}: {e.strerror}"
                raise LlmcError("E100", cause, "allow more processes (ulimit -u), files (-n) or memory (-v)") from e

    def receive(self, *kinds: type[Any]) -> Any:
        """Return the next message, which has one of these kinds. Raises the rank's LlmcError, and E119 if it has ended
        or does not answer."""
        try:
            message = self.link.receive()
        except TimeoutError:
            raise group_ended(f"rank {self.rank} did not answer") from None
        if isinstance(message, Failed):
            raise LlmcError(message.code, f"rank {self.rank}: {message.cause}", message.remedy)
        if message is None:
            raise self.ended() or group_ended(f"rank {self.rank} has closed its link")
        if not isinstance(message, kinds):
            raise RuntimeError(f"rank {self.rank} sent {message!r:.80} out of turn")
        return message

    def ended(self) -> LlmcError | None:
        """Return the error of a process that has ended, None while it runs."""
        try:
            code = self.process.wait(_REPORT)
        except subprocess.TimeoutExpired:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return group_ended(f"the process of rank {self.rank} {how}")

    def killed(self) -> LlmcError | None:
        """Return the error of a process that a signal has ended; a link that is at its end is a sign of it."""
        error = self.ended() if self._at_end or self.process.poll() is not None else None
        return error if (self.process.returncode or 0) < 0 else None

    def report(self) -> LlmcError | None:
        """Return the failure that the process has reported, if it was not received yet."""
        self.link.socket.settimeout(_REPORT)
        try:
            while (message := self.link.receive()) is not None:
                if isinstance(message, Failed):
                    return LlmcError(message.code, f"rank {self.rank}: {message.cause}", message.remedy)
            self._at_end = True
        except OSError:
            pass
        return None


class RankGroup:
    """The ranks above 0 of an artifact's group.

    `member` is the place of rank 0. `alarm` is a file descriptor that is readable once a process has ended while it is
    watched. `engine` is the number of the engine. Raises LlmcError E100 if a process cannot be created.
    """

    def __init__(
        self, artifact: Artifact, threads: int | None, verify: bool = True, limit: float = LIMIT, engine: int = 0
    ) -> None:
        ranks = artifact.manifest.ranks
        self._artifact, self._verify, self._engine = artifact, verify, engine
        self.threads = threads or max(1, default_threads() // ranks)
        self._memory = memory_file("llmc-ranks", b"")
        self.member = Member(0, ranks, self._memory.fileno(), limit)
        self._processes: list[RankProcess] = []
        self.alarm, self._end = os.eventfd(0), os.eventfd(0)
        self._watcher: threading.Thread | None = None
        try:
            for rank in range(1, ranks):
                self._processes.append(RankProcess(rank, self._memory.fileno(), limit))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [p.process.pid for p in self._processes]

    def join(self, kv_bytes: int) -> None:
        """Let every process open the artifact, with a KV cache of this size."""
        path = quote_from_bytes(os.fsencode(self._artifact.root.resolve()))
        for p in self._processes:
            call = Join(
                path, self._artifact.digest, p.rank, self.member.ranks, self.threads, kv_bytes, self.member.limit,
                self._verify, self._engine,
            )  # fmt: skip
            self._send(p, p.link.encode(call))

    def await_joined(self) -> list[bytes]:
        """Wait until every process has opened the artifact, and return the handles of their memories, in order."""
        return [p.receive(Joined).handle for p in self._processes]

    def watch(self, cancel: Callable[[], None]) -> None:
        """Watch the processes from now on: when one ends, call `cancel` in another thread."""
        self._watcher = threading.Thread(target=self._watch, args=(cancel,), name="llmc-ranks", daemon=True)
        self._watcher.start()

    def send(self, call: Call) -> None:
        """Send a call to every process. Raises LlmcError E119 if one has ended or does not take it."""
        data = self._processes[0].link.encode(call)
        for p in self._processes:
            self._send(p, data)

    def collect(self, digest: int) -> None:
        """Wait until every process has ended the step. Raises LlmcError E119 if one has sampled ids with another
        digest, has ended or does not answer."""
        for p in self._processes:
            done: Done = p.receive(Done)
            if done.digest != digest:
                cause = f"rank {p.rank} computed other tokens than rank 0"
                raise LlmcError("E119", cause, "run llmc verify on the artifact; check the machine's memory")

    def settle(self) -> None:
        """Let every process discard its steps. Raises LlmcError as `collect` does."""
        self.send(Settle())
        self.await_settled()

    def await_settled(self) -> None:
        """Wait for the answers to a call other than a step. Raises LlmcError as `collect` does."""
        for p in self._processes:
            while not isinstance(p.receive(Done, Settled), Settled):
                pass

    def failure(self) -> LlmcError:
        """Return the error that ended the group, after its alarm."""
        return self.cause(group_ended("a rank has ended"))

    def cause(self, error: LlmcError) -> LlmcError:
        """Return the error that ended the group, as far as the processes report it; otherwise `error`."""
        reports = [p.report() for p in self._processes]
        causes = [e for e in reports if e is not None and e.code != error.code]
        killed = [p.killed() for p in self._processes]
        return next((e for e in (*causes, *killed) if e is not None), error)

    def close(self) -> None:
        """End the processes and free the group's memory."""
        if self._memory.closed:
            return
        os.eventfd_write(self._end, 1)
        if self._watcher is not None:
            self._watcher.join()
        for p in self._processes:
            p.close()
        self._memory.close()
        os.close(self.alarm)
        os.close(self._end)

    def _send(self, p: RankProcess, data: bytes) -> None:
        try:
            p.link.send(data)
        except OSError as e:
            raise p.ended() or group_ended(f"rank {p.rank} takes no messages: {e}") from e

    def _watch(self, cancel: Callable[[], None]) -> None:
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        for p in self._processes:
            poller.register(p.link.socket, 0)  # its end is always reported
        if not any(fd == self._end for fd, _ in poller.poll()):
            cancel()
            os.eventfd_write(self.alarm, 1)
