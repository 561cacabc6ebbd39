"""Data-parallel training in several processes, over MLX's distributed backends.

Each process (a rank) computes the gradients of its share of a step's batches. Their sums over all ranks are divided
once, so every rank makes the same update. `mlx.launch` starts the processes and MLX moves the data: over TCP (ring),
MPI, RDMA over Thunderbolt (JACCL) or NCCL. What MLX lacks is here: the run ends with an error when a rank is lost.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil

from mlxlm import __version__
from mlxlm.backend.mlx import eval_arrays, mx, tree_flatten, tree_map, tree_unflatten
from mlxlm.train.distributed.heartbeat import Heartbeat, RankLostError, accept_ranks, connect_to_rank0
from mlxlm.utils import bounded_reads
from mlxlm.utils.errors import MlxlmError, PlatformError

HEARTBEAT_TIMEOUT = 20.0  # seconds of silence: longer than a machine that swaps is away
_HANG_TIMEOUT = 5.0  # seconds in which a collective must fail after a rank was lost
_POLL_SECONDS = 0.2
_MESSAGE_BYTES = 1 << 25  # summed at a time, as in MLX's average_gradients
_CARD_BYTES = 1024  # in which a rank introduces itself


def detect_backend() -> str | None:
    """Return the MLX backend for which this process was started, by its environment; None for a single process.

    Raises:
        PlatformError: The hostfile can't be read.
    """
    environment = os.environ
    if environment.get("MLX_RANK"):
        if environment.get("MLX_HOSTFILE"):
            return "ring" if _ring_hosts() else None
        if environment.get("MLX_IBV_DEVICES") and environment.get("MLX_JACCL_COORDINATOR"):
            return "jaccl"
        if environment.get("NCCL_HOST_IP") and environment.get("MLX_WORLD_SIZE", "1") != "1":
            return "nccl"
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environment.get(variable, "1") != "1":
            return "mpi"
    return None


class ProcessGroup:
    """This process and the others that train with it; by itself, a single process. Use it as a context.

    Args:
        rank: Number of this process, from 0.
        size: Number of processes.

    Attributes:
        status: Returns the status of this process, for `peer_status`. Called every second by another thread.
        on_rank_lost: Returns the error to show for a lost rank; a training loop saves its state in it.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self.status: Callable[[], dict[str, Any]] = dict
        self.on_rank_lost: Callable[[RankLostError], MlxlmError] = lambda lost: lost

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        pass

    @property
    def is_main_process(self) -> bool:
        """Whether this rank writes files and shows the progress: rank 0."""
        return self.rank == 0

    def batches_per_process(self, count: int) -> int:
        """Return each rank's share of a step's `count` batches. Raises PlatformError if the shares aren't equal."""
        if count % self.size:
            fitting = [n for n in range(1, count + 1) if count % n == 0]
            raise PlatformError(
                f"a step of this run has {count} batches, which {self.size} processes can't share equally",
                f"{' or '.join(map(str, fitting))} of them",
            )
        return count // self.size

    def all_reduce(self, tree: Any) -> Any:
        """Return the sums over all ranks of a tree of arrays, the same to the bit on each rank, and evaluated.

        Raises:
            RankLostError: A rank is lost. Nothing else has changed.
        """
        return tree

    def broadcast(self, tree: Any) -> Any:
        """Return rank 0's arrays on every rank. All trees have the same names, shapes and dtypes."""
        return tree

    def broadcast_object(self, value: Any = None) -> Any:
        """Return rank 0's JSON `value` on every rank. The others wait without using a core. Raises RankLostError."""
        return value

    def peer_status(self, name: str) -> list[Any]:
        """On rank 0: return the entry `name` of each other rank's status that has it, at most some seconds old."""
        return []

    def wait_for_peer_status(self, name: str) -> list[Any]:
        """On rank 0: return the entry `name` of each other rank's status, once all have it. Raises RankLostError."""
        return []


def join_process_group(
    on_hang: Callable[[MlxlmError], None], heartbeat_timeout: float = HEARTBEAT_TIMEOUT
) -> ProcessGroup:
    """Join the other processes that `mlx.launch` or `mpirun` has started, if there are any.

    Args:
        on_hang: Called by another thread if MLX waits for a lost rank without end, since that can't be interrupted. It
            should show the error and end the process.
        heartbeat_timeout: Seconds of silence after which a rank is lost.

    Raises:
        PlatformError: The processes can't meet, or have different versions of mlxlm or MLX.
        RankLostError: They can't reach each other.
    """
    backend = detect_backend()
    if backend is None:
        return ProcessGroup()
    try:
        group = mx.distributed.init(strict=True, backend=backend)
        return _DistributedGroup(group, backend, on_hang, heartbeat_timeout) if group.size() > 1 else ProcessGroup()
    except RuntimeError as error:
        raise PlatformError(
            f"MLX's {backend} backend can't connect the processes of the run: {error}",
            "mlx.launch --backend ring, and addresses at which the machines reach each other",
        ) from None


class _DistributedGroup(ProcessGroup):
    """Several processes.

    If rank 0 leaves the context, the run ends for all ranks, whatever the reason: on the others, `broadcast_object`
    returns None. If another rank leaves it before, it is lost for the others.
    """

    def __init__(self, group: Any, backend: str, on_hang: Callable[[MlxlmError], None], heartbeat_timeout: float):
        super().__init__(group.rank(), group.size())
        self._group, self._on_hang = group, on_hang
        self._waiting_since: float | None = None  # when the current collective began
        self._lost_at: float | None = None
        self._heartbeat = Heartbeat(self._connect(backend), heartbeat_timeout, self._own_status, self._on_lost)

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        if self.rank == 0:
            self._heartbeat.publish(None)
        self._heartbeat.close()

    def all_reduce(self, tree: Any) -> Any:
        eval_arrays(tree)
        flat = sorted(tree_flatten(tree), key=lambda item: str(item[1].dtype))
        results: list[tuple[str, mx.array]] = []
        with self._collective():
            while flat:
                dtype, size, count = flat[0][1].dtype, 0, 0
                while count < len(flat) and flat[count][1].dtype == dtype and size < _MESSAGE_BYTES:
                    size += flat[count][1].nbytes
                    count += 1
                names, arrays = zip(*flat[:count], strict=True)
                flat = flat[count:]
                message = mx.concatenate([array.reshape(-1) for array in arrays])
                total = mx.distributed.all_sum(message, group=self._group)
                pieces = mx.split(total, np.cumsum([array.size for array in arrays])[:-1].tolist())
                pieces = [piece.reshape(array.shape) for piece, array in zip(pieces, arrays, strict=True)]
                mx.eval(pieces)
                results += zip(names, pieces, strict=True)
        return tree_unflatten(results)

    def broadcast(self, tree: Any) -> Any:
        return self.all_reduce(tree if self.rank == 0 else tree_map(mx.zeros_like, tree))

    def broadcast_object(self, value: Any = None) -> Any:
        if self.rank > 0:
            return self._heartbeat.next_message()
        self._heartbeat.publish(value)
        return value

    def peer_status(self, name: str) -> list[Any]:
        return [status[name] for status in list(self._heartbeat.peer_status.values()) if name in status]

    def wait_for_peer_status(self, name: str) -> list[Any]:
        while len(values := self.peer_status(name)) < self.size - 1:
            if problem := self._heartbeat.problem(wait=_POLL_SECONDS):
                raise RankLostError(problem)
        return values

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Around what waits for all ranks: turn MLX's failure into RankLostError, and let `_on_lost` end a hang."""
        if problem := self._heartbeat.problem():
            raise RankLostError(problem)
        self._waiting_since = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            problem = self._heartbeat.problem(wait=2.0)
            if problem is None and "connection" not in str(error):
                raise
            raise RankLostError(problem or f"the connection to another process was lost ({error})") from None
        finally:
            self._waiting_since = None

    def _on_lost(self, problem: str) -> None:
        """Called by the heartbeat thread every second, since the main thread may wait in a collective without end."""
        self._lost_at = self._lost_at or time.monotonic()
        since = self._waiting_since
        if since is not None and time.monotonic() - max(self._lost_at, since) > _HANG_TIMEOUT:
            self._on_hang(self.on_rank_lost(RankLostError(problem)))

    def _own_status(self) -> dict[str, Any]:
        return self.status()

    def _connect(self, backend: str) -> dict[int, Connection]:
        """Compare versions, and connect all ranks to rank 0; returns the connections by rank."""
        card: dict[str, Any] = {"mlxlm": __version__, "mlx": mx.__version__}
        if self.rank > 0:
            main = self._exchange(card)[0]
            secret = main["secret"].encode()
            return {0: connect_to_rank0(main["addresses"], main["port"], secret, self.rank)}
        addresses, secret = _addresses(backend), secrets.token_hex(16)
        interface = addresses[0] if addresses[0].startswith("127.") else "0.0.0.0"
        with Listener((interface, 0), backlog=self.size, authkey=secret.encode()) as listener:
            self._exchange({**card, "secret": secret, "addresses": addresses, "port": listener.address[1]})
            return accept_ranks(listener, self.size - 1)

    def _exchange(self, card: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the cards of all ranks. Raises PlatformError if their versions differ."""
        row = json.dumps(card).encode().ljust(_CARD_BYTES)
        rows = mx.distributed.all_gather(mx.array(np.frombuffer(row, np.uint8))[None], group=self._group)
        cards = [json.loads(bytes(other)) for other in np.array(rows)]
        for other, their_card in enumerate(cards):
            for name in ("mlxlm", "mlx"):
                if their_card[name] != card[name]:
                    versions = f"rank {other} has {name} {their_card[name]}, rank {self.rank} has {card[name]}"
                    raise PlatformError(f"the machines differ: {versions}", "the same versions on all of them")
        return cards


def _ring_hosts() -> list[list[str]]:
    """Return MLX_HOSTFILE: for each rank the addresses with ports of the ring; [] for a single process."""
    path = Path(os.environ["MLX_HOSTFILE"])
    content = bounded_reads.read_bytes(path, 1 << 20, PlatformError)
    try:
        return json.loads(content) if content.strip() else []
    except ValueError:
        raise PlatformError(f"{path}, which MLX_HOSTFILE names, is not JSON", "mlx.launch, which makes it") from None


def _addresses(backend: str) -> list[str]:
    """Return the addresses of rank 0: the one that the backend uses, then its others, unless all ranks are local.

    Not all ranks reach each other by the links of a ring.
    """
    if backend == "ring":
        first = _ring_hosts()[0][0].rsplit(":", 1)[0]
    elif backend == "jaccl":
        first = os.environ["MLX_JACCL_COORDINATOR"].rsplit(":", 1)[0]
    else:
        first = os.environ["NCCL_HOST_IP"] if backend == "nccl" else socket.gethostname()
    if first.startswith("127."):
        return [first]
    others = [a.address for links in psutil.net_if_addrs().values() for a in links if a.family == socket.AF_INET]
    return [first, *(a for a in others if a != first and not a.startswith("127."))][:20]
