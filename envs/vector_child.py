"""Serves one environment of ``make_vec`` in a process of its own, forked from one that has imported this.

Invariant: every request has one answer, ``["ok", value]`` or the name and the message of an error of agentkit's:
of any when the environment is made, of an ``EnvError`` in an episode, which fails by whatever is raised in it.
"""

from __future__ import annotations

import json
import socket

from agentkit import registry
from agentkit.envs import forking
from agentkit.envs.serve import Seat, unknown
from agentkit.errors import AgentkitError, EnvError


def serve(connection: socket.socket) -> None:
    """Answer until the other end closes."""
    seat: Seat | None = None
    while (request := forking.receive(connection)) is not None:
        name, *arguments = json.loads(request)
        try:
            if name == "make":
                id, entry_point, kwargs = arguments
                if entry_point is not None and unknown(id, entry_point):
                    registry.register(id, entry_point)
                seat = Seat(id, kwargs)
                value = seat.describe()
            else:
                value = getattr(seat, "drop" if name == "close" else name)(*arguments)
            answer = ["ok", value]
        except BaseException as error:
            if isinstance(error, AgentkitError if name == "make" else EnvError):
                answer = [type(error).__name__, str(error)]
            else:
                answer = ["EnvCrashed", f"{name} raised {type(error).__name__}: {error}"]
        forking.send(connection, json.dumps(answer).encode())
