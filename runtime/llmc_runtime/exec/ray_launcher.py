"""The process that talks to Ray for rank 0: reserves CPUs on this machine and starts an actor for each other rank.

`main([SOCKET, LOG])`: the file descriptors of the socket pair with rank 0, and of the file for standard error. It ends
when rank 0 closes the socket; Ray then ends its actors and frees what it has reserved.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmc_runtime.exec.rank_messages import Failed, Link, Place, Placed
from llmc_runtime.exec.ray_actor import RankActor
from llmc_runtime.exec.ray_ranks import START, TOKEN
from llmc_runtime.format.errors import LlmcError, as_llmc_error

_NODE_SHARE = 0.001  # share requested of the resource that each node has under the name of its address
_START_SECONDS = 50.0
_NEVER_RAN = "never ran"  # message for an actor whose owner Ray cannot call, since its calls have no token
_AUTHENTICATE = "start every node of the cluster with RAY_AUTH_MODE=token and a token"


def connect() -> str:
    """Connect to the cluster and return the address of this machine's node. Raises LlmcError E141."""
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except ray.exceptions.AuthenticationError:
        raise LlmcError("E141", "there is no token for the Ray cluster", TOKEN) from None
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise LlmcError("E141", f"the Ray cluster cannot be reached: {str(e).splitlines()[0]}", START) from e
    node_id = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)


def reserve(address: str, place: Place) -> Any:
    """Return a placement group of the ranks on as few nodes of the machine with this address as have the CPUs.

    Raises LlmcError E142 if the nodes do not have the CPUs, or if they do not become free in time.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    cpus = [int(node["Resources"].get("CPU", 0)) for node in nodes]
    local = [count for count, node in zip(cpus, nodes, strict=True) if node["NodeManagerAddress"] == address]
    need = f"{place.ranks} ranks of {place.threads} threads need {place.ranks * place.threads} CPUs"
    if _places(local, place) < place.ranks:
        available = ", ".join(map(str, sorted(local, reverse=True)))
        cause = f"{need}, each rank's on one Ray node of this machine; its nodes have {available}"
        if _places(cpus, place) >= place.ranks:
            cause += f"; ranks share memory and cannot run on other machines (the cluster has {sum(cpus)} CPUs in all)"
        remedy = f"use fewer --threads, or start a node with more: ray start --num-cpus {place.ranks * place.threads}"
        raise LlmcError("E142", cause, remedy)
    bundles = [{"CPU": float(place.threads), f"node:{address}": _NODE_SHARE} for _ in range(place.ranks)]
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(place.seconds):
        free = int(ray.available_resources().get("CPU", 0))
        cause = f"{need}, and other Ray jobs use them: {free} of {sum(cpus)} CPUs of the cluster are free"
        raise LlmcError("E142", cause, "stop other Ray jobs, or start a node with more CPUs")
    return group


def _places(cpus: Sequence[int], place: Place) -> int:
    """Return the number of ranks for which nodes with these numbers of CPUs have room."""
    return sum(count // place.threads for count in cpus)


def start(group: Any, place: Place) -> list[Any]:
    """Start the actors of the ranks above 0 and return them once they have connected.

    Raises LlmcError E141 if the cluster does not authenticate, and E142 if an actor cannot start.
    """
    kind, actors = ray.remote(RankActor), []
    for rank in range(1, place.ranks):
        at = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        actors.append(kind.options(num_cpus=place.threads, max_restarts=0, scheduling_strategy=at).remote())
    try:
        modes = ray.get([a.connect.remote(place.path, i) for i, a in enumerate(actors, 1)], timeout=_START_SECONDS)
    except ray.exceptions.ActorDiedError as e:
        if _NEVER_RAN not in str(e):
            raise _of_actor(e) from e
        cause = "Ray ended the actors before they ran, as a cluster without authentication does"
        raise LlmcError("E141", cause, _AUTHENTICATE) from e
    except ray.exceptions.RayError as e:
        raise _of_actor(e) from e
    if not all(modes):
        cause = "the Ray cluster runs without authentication: any process that can connect can run code as this user"
        raise LlmcError("E141", cause, _AUTHENTICATE)
    for actor in actors:
        actor.run.remote()
    return actors


def _of_actor(error: Any) -> LlmcError:
    """Return the error for an actor that Ray could not start, or that could not connect."""
    of_code = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    cause = str(of_code or error).strip().splitlines()[-1]
    remedy = "run Ray on this machine as this user, with the Python environment of this command"
    return LlmcError("E142", f"an actor cannot run a rank: {cause}", remedy)


def main(argv: Sequence[str]) -> int:
    """Run the process with the arguments SOCKET LOG."""
    for number in (signal.SIGINT, signal.SIGTERM):  # handled by rank 0; a service manager signals all processes
        signal.signal(number, signal.SIG_IGN)
    descriptor, log = map(int, argv)
    os.dup2(log, 2)
    link = Link(socket.socket(fileno=descriptor), Place)
    place = link.receive()
    if place is None:
        return 0
    try:
        address = connect()
        link.send(link.encode(Placed()))
        actors = start(reserve(address, place), place)
        link.send(link.encode(Placed()))
        link.receive()  # until rank 0 closes the link
        del actors
    except OSError:  # rank 0 has closed the link
        return 0
    except Exception as e:
        error = as_llmc_error(e)
        link.send(link.encode(Failed(error.code, error.cause, error.remedy)))
        return 1
    return 0
