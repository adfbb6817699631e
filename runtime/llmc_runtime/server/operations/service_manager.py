"""Tells a service manager about the server's state, by the protocol of systemd's sd_notify(3)."""

from __future__ import annotations

import logging
import socket

READY, STOPPING = "READY=1", "STOPPING=1"
log = logging.getLogger("llmc.serve")


def notify(address: str, state: str) -> None:
    """Send a state to the datagram socket `address`, which is a path, or @ and a name in the abstract namespace.

    Does nothing if there is no address. An address that cannot be reached is logged: the server works without it.
    """
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
            link.connect("\0" + address[1:] if address.startswith("@") else address)
            link.sendall(state.encode())
    except OSError as e:
        log.warning("the state %s was not reported to the service manager: %s", state, e.strerror)
