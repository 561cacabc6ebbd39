"""Data-parallel training in several processes, over MLX's distributed backends.

Each process (a rank) computes the gradients of its share of a step's batches. Their sums over all ranks are divided
once, so every rank makes the same update. `mlx.launch` starts the processes and MLX moves the data: over TCP (ring),
MPI, RDMA over Thunderbolt (JACCL) or NCCL. What MLX lacks is here: when a rank is lost, the collective that waits for
it ends with RankLostError.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Listener
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil

from mlxlm import __version__
from mlxlm.backend.mlx import eval_arrays, mx, tree_flatten, tree_unflatten
from mlxlm.train.distributed.heartbeat import Heartbeat, RankLostError, accept_ranks, connect_to_rank0
from mlxlm.utils import bounded_reads
from mlxlm.utils.errors import MlxlmError, PlatformError

HEARTBEAT_TIMEOUT = 20.0  # seconds of silence: longer than a machine that swaps is away
_JOIN_TIMEOUT = 120.0  # seconds: Python and MLX start slowly from a network drive
_HANG_TIMEOUT = 10.0  # seconds in which a collective must fail after its connections were cut
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
    """This process and the others that train with it. Use it as a context.

    If rank 0 leaves the context, the run ends for all ranks, whatever the reason: on the others, `broadcast_object`
    returns None. If another rank leaves it by an exception, it is lost for the others.

    Args:
        rank: Number of this process, from 0.
        size: Number of processes.
        group: MLX's group.
        on_hang: See `join`.

    Attributes:
        status: Returns the status of this process, for `peer_status`. Called every second by another thread.
        on_rank_lost: Returns the error to show for a lost rank; a training loop saves its state in it.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: Any = None,
        on_hang: Callable[[MlxlmError], None] = lambda _error: None,
    ):
        self.rank, self.size = rank, size
        self.status: Callable[[], dict[str, Any]] = dict
        self.on_rank_lost: Callable[[RankLostError], MlxlmError] = lambda lost: lost
        self._group, self._on_hang = group, on_hang
        self._heartbeat: Heartbeat | None = None
        self._sockets: set[int] = set()  # of MLX's backend
        self._waiting_since: float | None = None  # when the current collective began
        self._cut_at: float | None = None  # when the sockets were shut down

    @classmethod
    def single_process(cls) -> ProcessGroup:
        """Return a group of one process, without any cost."""
        return cls()

    @classmethod
    def join(cls, on_hang: Callable[[MlxlmError], None], heartbeat_timeout: float = HEARTBEAT_TIMEOUT) -> ProcessGroup:
        """Join the other processes that `mlx.launch` or `mpirun` has started, if there are any.

        Args:
            on_hang: Called by another thread if MLX waits forever for a lost rank and can't be interrupted. It should
                show the error and end the process. With the ring this only happens before the processes have met,
                because cutting its connections makes the collective fail.
            heartbeat_timeout: Seconds of silence after which a rank is lost.

        Raises:
            PlatformError: The processes can't meet, or have different versions of mlxlm or MLX.
            RankLostError: They can't reach each other.
        """
        backend = detect_backend()
        if backend is None:
            return cls.single_process()
        late = PlatformError(
            f"the other processes of the run have not come within {_JOIN_TIMEOUT:g} seconds",
            "looking at their messages; a firewall that lets the machines reach each other",
        )
        timer = threading.Timer(_JOIN_TIMEOUT, on_hang, [late])
        timer.daemon = True
        timer.start()
        before = _open_sockets()
        try:
            group = mx.distributed.init(strict=True, backend=backend)
            process_group = cls(group.rank(), group.size(), group, on_hang)
            process_group._sockets = _open_sockets() - before
            if process_group.size > 1:
                process_group._start_heartbeat(backend, heartbeat_timeout)
        except RuntimeError as error:
            raise PlatformError(
                f"MLX's {backend} backend can't connect the processes of the run: {error}",
                "mlx.launch --backend ring, and addresses at which the machines reach each other",
            ) from None
        finally:
            timer.cancel()
        return process_group

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        if self._heartbeat is not None:
            if self.rank == 0:
                self._heartbeat.publish(None)
            self._heartbeat.disconnect(graceful=self.rank == 0 or kind is None)

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

        Arrays travel together, in messages of about 32 MB.

        Raises:
            RankLostError: A rank is lost. Nothing else has changed.
        """
        if self.size == 1:
            return tree
        eval_arrays(tree)
        return self._all_sum(tree, lambda x: x)

    def broadcast(self, tree: Any) -> Any:
        """Return rank 0's arrays on every rank, to the bit. All trees have the same names, shapes and dtypes."""
        if self.size == 1:
            return tree
        eval_arrays(tree)

        def bits(array: mx.array) -> mx.array:
            array = array.view(mx.uint8)
            return array if self.rank == 0 else mx.zeros_like(array)

        return self._all_sum(tree, bits)

    def broadcast_object(self, value: Any = None) -> Any:
        """Return rank 0's JSON `value` on every rank. The others wait without using a core. Raises RankLostError."""
        if self._heartbeat is None:
            return value
        if self.rank == 0:
            self._heartbeat.publish(value)
            return value
        return self._heartbeat.next_message()

    def peer_status(self, name: str) -> list[Any]:
        """Return the entry `name` of each other rank's status that has it, at most some seconds old."""
        peers = self._heartbeat.peer_status.values() if self._heartbeat is not None else ()
        return [status[name] for status in list(peers) if name in status]

    def wait_for_peer_status(self, name: str) -> list[Any]:
        """Return the entry `name` of each other rank's status, once all have it. Raises RankLostError."""
        while len(values := self.peer_status(name)) < self.size - 1:
            if problem := self._heartbeat.problem(wait=_POLL_SECONDS):
                raise RankLostError(problem)
        return values

    def _all_sum(self, tree: Any, prepare: Callable[[mx.array], mx.array]) -> Any:
        flat = sorted(tree_flatten(tree), key=lambda item: str(item[1].dtype))
        results: list[tuple[str, mx.array]] = []
        with self._collective():
            while flat:
                dtype, size, count = flat[0][1].dtype, 0, 0
                while count < len(flat) and flat[count][1].dtype == dtype and size < _MESSAGE_BYTES:
                    size += flat[count][1].nbytes
                    count += 1
                part, flat = flat[:count], flat[count:]
                message = mx.concatenate([prepare(array.reshape(-1)) for _, array in part])
                total = mx.distributed.all_sum(message, group=self._group).view(dtype)
                ends = np.cumsum([array.size for _, array in part]).tolist()
                pieces = mx.split(total, ends[:-1])
                pieces = [piece.reshape(array.shape) for piece, (_, array) in zip(pieces, part, strict=True)]
                mx.eval(pieces)
                results += [(name, piece) for piece, (name, _) in zip(pieces, part, strict=True)]
        return tree_unflatten(results)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Around what waits for all ranks: turn MLX's failure into RankLostError, and let `_on_lost` interrupt it."""
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
        """Called by the heartbeat thread every second: interrupt the collective that the main thread waits in."""
        if self._waiting_since is None:
            return
        if self._cut_at is None:
            self._cut_at = time.monotonic()
            for number in self._sockets:
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        elif time.monotonic() - max(self._cut_at, self._waiting_since) > _HANG_TIMEOUT:
            self._on_hang(self.on_rank_lost(RankLostError(problem)))

    def _start_heartbeat(self, backend: str, timeout: float) -> None:
        """Compare versions, and connect all ranks to rank 0."""
        card: dict[str, Any] = {"mlxlm": __version__, "mlx": mx.__version__}
        listener, secret = None, secrets.token_hex(16)
        if self.rank == 0:
            address = _own_address(backend, self.rank)
            interface = address if address.startswith("127.") else "0.0.0.0"
            listener = Listener((interface, 0), backlog=self.size, authkey=secret.encode())
            card |= {"secret": secret, "addresses": _addresses(address), "port": listener.address[1]}
        cards = self._gather(card)
        for other, their_card in enumerate(cards):
            for name in ("mlxlm", "mlx"):
                if their_card[name] != card[name]:
                    versions = f"rank {other} has {name} {their_card[name]}, rank {self.rank} has {card[name]}"
                    raise PlatformError(f"the machines differ: {versions}", "the same versions on all of them")
        if listener is not None:
            with listener:
                connections = accept_ranks(listener, self.size - 1)
        else:
            main = cards[0]
            secret = main["secret"].encode()
            connections = {0: connect_to_rank0(main["addresses"], main["port"], secret, self.rank)}
        status = lambda: self.status()  # noqa: E731, PLW0108 - `self.status` is replaced while the heartbeat runs
        self._heartbeat = Heartbeat(self.rank, connections, timeout, status, self._on_lost)

    def _gather(self, card: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the cards of all ranks."""
        row = json.dumps(card).encode().ljust(_CARD_BYTES)
        rows = mx.distributed.all_gather(mx.array(np.frombuffer(row, np.uint8))[None], group=self._group)
        return [json.loads(bytes(other)) for other in np.array(rows)]


def _ring_hosts() -> list[list[str]]:
    """Return MLX_HOSTFILE: for each rank the addresses with ports of the ring; [] for a single process."""
    path = Path(os.environ["MLX_HOSTFILE"])
    content = bounded_reads.read_bytes(path, 1 << 20, PlatformError)
    try:
        return json.loads(content) if content.strip() else []
    except ValueError:
        raise PlatformError(f"{path}, which MLX_HOSTFILE names, is not JSON", "mlx.launch, which makes it") from None


def _own_address(backend: str, rank: int) -> str:
    """Return the address at which the backend itself reaches this rank."""
    if backend == "ring":
        return _ring_hosts()[rank][0].rsplit(":", 1)[0]
    if backend == "jaccl":
        return os.environ["MLX_JACCL_COORDINATOR"].rsplit(":", 1)[0]
    return os.environ["NCCL_HOST_IP"] if backend == "nccl" else socket.gethostname()


def _addresses(first: str) -> list[str]:
    """Return `first` and other addresses of this machine: not all ranks reach each other by the links of a ring."""
    if first.startswith("127."):
        return [first]
    others = [a.address for links in psutil.net_if_addrs().values() for a in links if a.family == socket.AF_INET]
    return [first, *(a for a in others if a != first and not a.startswith("127."))][:20]


def _open_sockets() -> set[int]:
    """Return the file descriptors of this process that are sockets."""
    numbers = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of the folder itself
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                numbers.add(int(name))
    return numbers
