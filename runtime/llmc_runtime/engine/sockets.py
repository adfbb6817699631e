"""The sockets between an engine process and the process that started it, in a folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

ADDS, CONTROL, REPORTS = "adds", "control", "reports"  # names in the folder; see engine.messages


def open_socket(context: zmq.Context[Any], kind: int, folder: Path, name: str, *, binds: bool, linger: int) -> Any:
    """Return a socket of this kind (zmq.PUSH or zmq.PULL), bound or connected to `name` in the folder.

    `linger` is the number of milliseconds for which closing waits until messages are sent. There are no high-water
    marks: the number of open requests bounds what a socket can hold. Raises zmq.ZMQError.
    """
    socket = context.socket(kind)
    socket.set(zmq.LINGER, linger)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    (socket.bind if binds else socket.connect)(f"ipc://{folder / name}")
    return socket
