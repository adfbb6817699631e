"""The actor that runs a rank in a process of Ray."""

from __future__ import annotations

import os
import select
import socket
import threading

from llmc_runtime.exec.rank_messages import Call, Hello, Link
from llmc_runtime.exec.rank_process import run


class RankActor:
    """Connects to rank 0, then runs its steps. The process ends when rank 0 closes the connection or ends."""

    def connect(self, path: str, rank: int) -> bool:
        """Connect to the socket of rank 0. Return whether this node of Ray requires a token.

        Raises OSError if the socket is not there, so that this is another machine, or belongs to another user.
        """
        from ray._raylet import AuthenticationMode, get_authentication_mode

        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as e:
            where = f"{socket.gethostname()}, user {os.getuid()}"
            raise OSError(f"it cannot connect to {path} at {where}: {e.strerror}") from None
        self._link = Link(self._socket, Call)
        self._link.send(self._link.encode(Hello(rank)))
        return bool(get_authentication_mode() == AuthenticationMode.TOKEN)

    def run(self) -> None:
        """Run the steps that rank 0 sends, until it ends."""
        _, (memory,), _, _ = socket.recv_fds(self._socket, 1, 1)
        threading.Thread(target=self._end_with_rank_0, name="llmc-rank-0", daemon=True).start()
        run(self._link, memory)

    def _end_with_rank_0(self) -> None:
        """End this process when the connection is closed, also while a step waits for rank 0."""
        poller = select.poll()
        poller.register(self._socket, 0)  # its end is always reported
        poller.poll()
        os._exit(0)
