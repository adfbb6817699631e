"""Ranks that Ray places: actors on this machine, each of which runs a rank and connects to rank 0.

Another process talks to Ray (ray_launcher.py), so that Ray's threads and connections are not in that of rank 0, and
steps do not go through Ray. The actors, and what is reserved for them, end with that process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import struct
import time
from typing import Any

from llmc_runtime.device.device import group_ended
from llmc_runtime.exec.rank import REPORT_SECONDS, Rank
from llmc_runtime.exec.rank_messages import Failed, Hello, Link, Place, Placement, Reply
from llmc_runtime.format.errors import LlmcError, missing_extra
from llmc_runtime.python_command import LinkedProcess, memory_file, module_command, socket_folder

_CPU_SECONDS = 60.0  # timeout for CPUs, such as those of a group that is ending
_CONNECT_SECONDS = 40.0  # timeout for connecting to the cluster
_START_SECONDS = 60.0  # timeout for the actors' processes to start
_HELLO_SECONDS = 5.0
_POLL_SECONDS = 0.2  # seconds between two looks at the messages of Ray's client
_SOCKET = "ranks"
_PEER = struct.Struct("3i")  # process, user and group at the other end of a Unix socket
_TOKEN_REFUSED = b"Unauthenticated"  # text of Ray's client log; its exception does not contain it
START = "start Ray here (RAY_AUTH_MODE=token ray start --head), or set RAY_ADDRESS to its address"
TOKEN = "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token, or put it into ~/.ray/auth_token"


class RayRank(Rank):
    """The actor of one rank, at the other end of a connection to the socket of rank 0."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        super().__init__(rank, connection)
        self._pid = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
        self._fd = os.pidfd_open(self._pid)

    @property
    def pid(self) -> int:
        """The id of the actor's process."""
        return self._pid

    @property
    def killed(self) -> bool:
        """Whether the process has ended: it ends by itself only after rank 0."""
        return self._exited(0.0)

    def ended(self) -> LlmcError | None:
        """Return the error of an actor whose process has ended, None while it runs."""
        if not self._exited(REPORT_SECONDS):
            return None
        return group_ended(f"the actor of rank {self.rank}, process {self._pid}, has ended")

    def kill(self) -> None:
        """Kill the process, which may be stopped."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        """Close the link, whereupon the process ends."""
        self.link.socket.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _exited(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(1000 * seconds))


class RayPlacement:
    """The actors of a group of ranks, and the process that talks to Ray.

    `threads` is the number of CPUs that each rank reserves. Raises LlmcError E140 if Ray is not installed, E141 if the
    cluster cannot be reached or does not authenticate, E142 if it has no place for the ranks, and E100.
    """

    def __init__(self, ranks: int, threads: int) -> None:
        if importlib.util.find_spec("ray") is None:
            missing = missing_extra("ray")
            assert missing is not None
            raise missing
        self._ranks = ranks
        try:
            self._folder = socket_folder(_SOCKET)
        except (OSError, UnicodeEncodeError) as e:
            raise LlmcError("E100", f"the ranks' socket cannot be made: {e}", "check TMPDIR (short, writable)") from e
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._launcher: _Launcher | None = None
        try:
            path = str(self._folder / _SOCKET)
            self._listener.bind(path)
            self._listener.listen(ranks)
            self._listener.settimeout(_HELLO_SECONDS)
            self._launcher = _Launcher()
            self._launcher.place(Place(path, ranks, threads, _CPU_SECONDS))
        except BaseException:
            self.close()
            raise

    def ranks(self, memory: int, limit: float) -> list[Rank]:
        """Return the ranks above 0. Each gets the group's memory, a file descriptor; `limit` is that of its socket."""
        ranks: dict[int, RayRank] = {}
        while len(ranks) < self._ranks - 1:
            connection, _ = self._listener.accept()
            connection.settimeout(_HELLO_SECONDS)
            hello = Link(connection, Reply).receive()
            if not isinstance(hello, Hello):
                raise group_ended("an actor has ended")
            socket.send_fds(connection, [b"\0"], [memory])
            connection.settimeout(limit)
            ranks[hello.rank] = RayRank(hello.rank, connection)
        self._close_socket()
        return [ranks[rank] for rank in sorted(ranks)]

    def close(self) -> None:
        """End the actors, and give back what is reserved."""
        if self._launcher is not None:
            self._launcher.close()
        self._close_socket()

    def _close_socket(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Launcher(LinkedProcess):
    """The process that talks to Ray. Its standard error is kept, since Ray explains failures there."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._log = memory_file("llmc-ray", b"")
        self._link = Link(ours, Placement)
        with theirs:
            descriptors = [theirs.fileno(), self._log.fileno()]
            command = ["env", "RAY_AUTH_MODE=token", *module_command("llmc_runtime.exec.ray_launcher")]
            super().__init__(ours, [*command, *map(str, descriptors)], descriptors)

    def place(self, place: Place) -> None:
        """Place the ranks. Raises the LlmcErrors of RayPlacement."""
        self._link.send(self._link.encode(place))
        self._answer(_CONNECT_SECONDS, "the Ray cluster did not answer")
        self._answer(place.seconds + _START_SECONDS, "Ray did not start the ranks")

    def _answer(self, seconds: float, cause: str) -> None:
        """Wait for the next answer."""
        until = time.monotonic() + seconds
        while not select.select([self._link.socket], [], [], _POLL_SECONDS)[0]:
            if _TOKEN_REFUSED in self._text():
                raise LlmcError("E141", "the Ray cluster refuses the token", TOKEN)
            if time.monotonic() > until:
                raise LlmcError("E141", f"{cause} within {seconds:g} s{self._last_line()}", START)
        answer: Any = self._link.receive()
        if answer is None:
            raise LlmcError("E141", f"the process that talks to Ray has ended{self._last_line()}", START)
        if isinstance(answer, Failed):
            raise LlmcError(answer.code, answer.cause, answer.remedy)

    def _text(self) -> bytes:
        return os.pread(self._log.fileno(), 1 << 16, 0)

    def _last_line(self) -> str:
        lines = self._text().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][-200:]}" if lines else ""
