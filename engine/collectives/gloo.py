"""By torch's gloo, over TCP on the loopback device: everywhere, and a hundred microseconds and more a call."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from engine.collectives.base import Collective, Place, PythonCollective
from engine.errors import CollectiveError

_HOST = "127.0.0.1"


class Meeting:
    """Where the ranks find each other: a port of the loopback device that rank 0 already listens on."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = socket.create_server((_HOST, 0))
        self.port: int = self._listener.getsockname()[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"port": self.port, "_listener": None}

    def take_listener(self) -> int:
        """On rank 0: the descriptor, which is the caller's from now on."""
        assert self._listener is not None
        return self._listener.detach()

    def close(self) -> None:
        """Stop listening, unless the listener was taken."""
        if self._listener is not None:
            self._listener.close()


class Gloo:
    """See this module."""

    name = "gloo"
    verified = True

    def unavailable(self, place: Place) -> str | None:
        """See `Backend.unavailable`."""
        if place.device != "cpu":
            return f"it adds up in main memory, and the model is on {place.device}"
        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            return "this torch was built without gloo"
        return None

    def meeting(self, place: Place) -> Meeting:
        """See `Backend.meeting`."""
        return Meeting()

    def open(self, meeting: Meeting, rank: int, place: Place, timeout_s: float) -> Collective:
        """See `Backend.open`."""
        from torch.distributed import ProcessGroupGloo

        store = open_store(meeting, rank, place.ranks)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            group = ProcessGroupGloo(store, rank, place.ranks, options)
        except RuntimeError as error:
            raise CollectiveError(f"rank {rank}: gloo cannot connect the {place.ranks} ranks: {error}") from error
        return GlooCollective(group, store, rank, place.ranks, timeout_s)


def open_store(meeting: Meeting, rank: int, ranks: int) -> Any:
    """The key-value store by which the ranks exchange addresses. A rank that never comes is noticed elsewhere."""
    from torch.distributed import TCPStore

    patience = timedelta(hours=1)
    if rank == 0:
        listener = meeting.take_listener()
        return TCPStore(_HOST, meeting.port, ranks, True, patience, wait_for_workers=False, master_listen_fd=listener)
    return TCPStore(_HOST, meeting.port, ranks, False, patience, wait_for_workers=False)


class GlooCollective(PythonCollective):
    """One rank's end."""

    def __init__(self, group: Any, store: Any, rank: int, ranks: int, timeout_s: float) -> None:
        super().__init__("gloo", rank, ranks, timeout_s)
        self._group, self._store = group, store

    def _sum(self, x: Tensor) -> None:
        self._group.allreduce([x]).wait()

    def _gather(self, x: Tensor, parts: list[Tensor]) -> None:
        self._group.allgather([parts], [x]).wait()

    def _send(self, x: Tensor) -> None:
        self._group.broadcast([x]).wait()

    def close(self) -> None:
        """See `Collective.close`."""


BACKEND = Gloo()
