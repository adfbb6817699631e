"""The processes of the ranks above 0, as rank 0 sees them: starting, calling, watching and ending them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.device import Member, group_ended
from llmc_runtime.exec.rank import REPORT_SECONDS, Rank
from llmc_runtime.exec.rank_messages import Call, Done, Join, Joined, Settle, Settled
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.heartbeat import HEARTBEAT_TIMEOUT, SHARED_BYTES, TICK_SECONDS, Silence, shared_counters
from llmc_runtime.host_info import default_threads
from llmc_runtime.python_command import LinkedProcess, memory_file, module_command, quoted

if TYPE_CHECKING:
    from llmc_runtime.exec.ray_ranks import RayPlacement

LIMIT_SECONDS = 300.0  # seconds that ranks wait for each other, as long as a step on a CPU may take


class RankProcess(Rank):
    """The process of one rank, a child of this process. Raises LlmcError E100 if it cannot be created."""

    def __init__(self, rank: int, memory: int, limit: float) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(limit)
        super().__init__(rank, ours)
        with theirs:
            descriptors = [theirs.fileno(), memory]
            command = [*module_command("llmc_runtime.exec.rank_process"), *map(str, descriptors), str(os.getpid())]
            try:
                self._child = LinkedProcess(ours, command, descriptors)
            except OSError as e:
                cause = f"the system cannot create a process for rank {rank}: {e.strerror}"
                raise LlmcError("E100", cause, "allow more processes (ulimit -u), files (-n) or memory (-v)") from e

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._child.process.pid

    @property
    def killed(self) -> bool:
        """Whether a signal has ended the process."""
        return (self._child.process.poll() or 0) < 0

    def ended(self) -> LlmcError | None:
        """Return the error of a process that has ended, None while it runs."""
        try:
            code = self._child.process.wait(REPORT_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return group_ended(f"the process of rank {self.rank} {end}")

    def kill(self) -> None:
        """Kill the process, which may be stopped."""
        self._child.process.kill()

    def close(self) -> None:
        """Close the link and kill the process."""
        self._child.close()


class RankGroup:
    """The ranks above 0 of an artifact's group.

    They are processes that this one starts or, with `ray`, actors of a Ray cluster on this machine. `member` is the
    place of rank 0. `failure_fd` is a file descriptor that is readable once a watched process has ended, or has sent no
    heartbeat for `heartbeat_timeout` seconds. `engine` is the number of the engine. Raises LlmcError E100 if
    a process cannot be created, and E140 to E142 if Ray cannot place the ranks.
    """

    def __init__(
        self,
        artifact: Artifact,
        threads: int | None,
        verify: bool = True,
        ray: bool = False,
        engine: int = 0,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
    ) -> None:
        ranks = artifact.manifest.ranks
        self._artifact, self._verify, self._engine = artifact, verify, engine
        self.threads = threads or max(1, default_threads() // ranks)
        self._memory = memory_file("llmc-ranks", bytes(SHARED_BYTES))
        self.member = Member(0, ranks, self._memory.fileno(), LIMIT_SECONDS)
        self._processes: list[Rank] = []
        self._placement: RayPlacement | None = None
        self.failure_fd, self._end = os.eventfd(0), os.eventfd(0)
        self._watcher: threading.Thread | None = None
        self._heartbeat_timeout = heartbeat_timeout
        self._hung: LlmcError | None = None  # error about the first process whose heartbeats were missing
        try:
            if ray:
                from llmc_runtime.exec.ray_ranks import RayPlacement

                self._placement = RayPlacement(ranks, self.threads)
                self._processes += self._placement.ranks(self._memory.fileno(), LIMIT_SECONDS)
            else:
                for rank in range(1, ranks):
                    self._processes.append(RankProcess(rank, self._memory.fileno(), LIMIT_SECONDS))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    def join(self, kv_bytes: int, snapshots: int) -> None:
        """Let every process open the artifact, with a KV cache of this size and this number of snapshots."""
        paths = [quoted(part.root) for part in self._artifact.parts]
        draft = paths[1] if len(paths) > 1 else ""
        for process in self._processes:
            call = Join(
                path=paths[0],
                draft=draft,
                digest=self._artifact.digest,
                rank=process.rank,
                ranks=self.member.ranks,
                threads=self.threads,
                kv_bytes=kv_bytes,
                snapshots=snapshots,
                limit=self.member.limit,
                verify=self._verify,
                engine=self._engine,
            )
            self._send(process, process.link.encode(call))

    def await_joined(self) -> list[bytes]:
        """Wait until every process has opened the artifact, and return the handles of their memories, in order."""
        return [process.receive(Joined).handle for process in self._processes]

    def watch(self, cancel: Callable[[], None]) -> None:
        """Watch the processes from now on: when one ends or hangs, call `cancel` in another thread."""
        self._watcher = threading.Thread(target=self._watch, args=(cancel,), name="llmc-ranks", daemon=True)
        self._watcher.start()

    def send(self, call: Call) -> None:
        """Send a call to every process. Raises LlmcError E119 if one has ended or does not take it."""
        data = self._processes[0].link.encode(call)
        for process in self._processes:
            self._send(process, data)

    def collect(self, digest: int) -> None:
        """Wait until every process has ended the step. Raises LlmcError E119 if one has sampled ids with another
        digest, has ended or does not answer."""
        for process in self._processes:
            done: Done = process.receive(Done)
            if done.digest != digest:
                cause = f"rank {process.rank} computed other tokens than rank 0"
                raise LlmcError("E119", cause, "run llmc verify on the artifact; check the machine's memory")

    def settle(self) -> None:
        """Let every process discard its steps. Raises LlmcError as `collect` does."""
        self.send(Settle())
        self.await_settled()

    def await_settled(self) -> None:
        """Wait for the answers to a call other than a step. Raises LlmcError as `collect` does."""
        for process in self._processes:
            while not isinstance(process.receive(Done, Settled), Settled):
                pass

    def failure(self) -> LlmcError:
        """Return the error that ended the group. Call it once `failure_fd` is readable."""
        return self.cause(group_ended("a rank has ended"))

    def cause(self, error: LlmcError) -> LlmcError:
        """Return the error that ended the group, as far as the processes report it; otherwise `error`."""
        if self._hung is not None:
            return self._hung
        until = time.monotonic() + (0.0 if any(process.killed for process in self._processes) else REPORT_SECONDS)
        reports = [process.report(until) for process in self._processes]
        causes = [e for e in reports if e is not None and e.code != error.code]
        # A link is closed shortly before the process has ended.
        ended = [(process, process.ended()) for process in self._processes if process.killed or process.closed]
        killed = [e for process, e in ended if process.killed]
        return next((e for e in (*causes, *killed) if e is not None), error)

    def close(self) -> None:
        """End the processes and free the group's memory."""
        if self._memory.closed:
            return
        os.eventfd_write(self._end, 1)
        if self._watcher is not None:
            self._watcher.join()
        for process in self._processes:
            process.close()
        if self._placement is not None:
            self._placement.close()
        self._memory.close()
        os.close(self.failure_fd)
        os.close(self._end)

    def _send(self, process: Rank, data: bytes) -> None:
        try:
            process.link.send(data)
        except OSError as e:
            raise process.ended() or group_ended(f"rank {process.rank} takes no messages: {e}") from e

    def _watch(self, cancel: Callable[[], None]) -> None:
        """Watch the other ranks until the group ends: their sockets, processes and heartbeats (a thread's function)."""
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        for process in self._processes:
            poller.register(process.link.socket, 0)  # its end is always reported
        counters = shared_counters(self._memory.fileno())
        silences = [Silence() for _ in self._processes]
        sent = counters.tolist()  # heartbeats up to the last check
        last = time.monotonic()
        while not (ready := poller.poll(1000 * TICK_SECONDS)) and self._hung is None:
            now = time.monotonic()
            for process, silence in zip(self._processes, silences, strict=True):
                if counters[process.rank] != sent[process.rank]:
                    silence.end()
                self._check(process, silence.exceeded(now - last, process.pid, self._heartbeat_timeout))
            sent = counters.tolist()
            last = now
        if not any(fd == self._end for fd, _ in ready):
            cancel()
            os.eventfd_write(self.failure_fd, 1)

    def _check(self, process: Rank, exceeded: float | None) -> None:
        """End a process whose heartbeats have been missing for `exceeded` seconds, unless that is None."""
        if exceeded is None or self._hung is not None:
            return
        self._hung = group_ended(f"the process of rank {process.rank} sent no heartbeat for {exceeded:g} s")
        process.kill()  # rank 0 may wait for its answer
