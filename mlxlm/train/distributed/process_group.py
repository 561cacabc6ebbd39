"""Several processes that train one model: data parallel, over MLX's distributed backends.

Each process (a rank) computes the gradients of its share of a step's batches; their sums over all ranks are divided
once, so every rank makes the same update. `mlx.launch` starts the processes and MLX moves the data: over TCP (ring),
MPI, RDMA over Thunderbolt (JACCL) or NCCL.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mlxlm import __version__
from mlxlm.backend.mlx import eval_arrays, mx, tree_flatten, tree_unflatten
from mlxlm.train.distributed import heartbeat
from mlxlm.train.distributed.heartbeat import Heartbeat, RankLostError
from mlxlm.utils import bounded_reads
from mlxlm.utils.errors import MlxlmError, PlatformError

HEARTBEAT_TIMEOUT = 20.0  # seconds of silence: longer than a machine that swaps is away
_MEETING = 120.0  # seconds in which all ranks have to come: Python and MLX start slowly from a network drive
_STUCK = 10.0  # seconds in which a collective that was cut off has to fail
_POLL = 0.2  # seconds between two looks at what the others have told
_MESSAGE = 1 << 25  # bytes that are summed at a time, as MLX's average_gradients does
_CARD = 256  # bytes in which a rank introduces itself


def detect_backend() -> str | None:
    """The MLX backend for which this process was started as one of several, by its environment; None: it is alone.

    Raises PlatformError for a hostfile that can't be read.
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
    """This process and the others that train with it.

    rank: its number, from 0. size: how many there are.
    status: gives what the others should know of this process; asked each second, from another thread.
    on_rank_lost: what makes the error that is shown, from the loss of a rank; a loop puts here what saves its state first.

    A context. Rank 0 that leaves it ends the run for all, whatever the reason: `broadcast_object` gives None on the others. Where
    another rank leaves it by an error, it is lost for the others.
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
        self._group, self._when_stuck = group, on_hang
        self._pulse: Heartbeat | None = None
        self._sockets: set[int] = set()
        self._inside: float | None = None  # when the collective that this process waits in began
        self._cut: float | None = None

    @classmethod
    def single_process(cls) -> ProcessGroup:
        """One process: every sum is its own. Costs nothing."""
        return cls()

    @classmethod
    def join(cls, on_hang: Callable[[MlxlmError], None], heartbeat_timeout: float = HEARTBEAT_TIMEOUT) -> ProcessGroup:
        """Meet the others that `mlx.launch` or `mpirun` has started; `single_process()` where there are none.

        heartbeat_timeout: seconds of silence after which a rank is held to be lost.
        on_hang: called from another thread where MLX waits for ever for a rank that is lost and can't be
            interrupted: it should show the error and end the process. With the ring that doesn't happen after the
            meeting, since cutting its connections makes it fail.

        Raises PlatformError if the processes can't meet or have other versions of mlxlm or MLX, RankLost if they
        can't reach each other.
        """
        backend = detect_backend()
        if backend is None:
            return cls.single_process()
        late = PlatformError(
            f"the other processes of the run have not come within {_MEETING:g} seconds",
            "looking at their messages; a firewall that lets the machines reach each other",
        )
        timer = threading.Timer(_MEETING, on_hang, [late])
        timer.daemon = True
        timer.start()
        before = _open_sockets()
        try:
            group = mx.distributed.init(strict=True, backend=backend)
            process_group = cls(group.rank(), group.size(), group, on_hang)
            process_group._sockets = _open_sockets() - before
            if process_group.size > 1:
                process_group._meet(backend, heartbeat_timeout)
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

    def __exit__(self, kind: type[BaseException] | None, _error: object, _where: TracebackType | None) -> None:
        if self._pulse is not None:
            if self.rank == 0:
                self._pulse.publish(None)
            self._pulse.disconnect(graceful=self.rank == 0 or kind is None)

    @property
    def is_main_process(self) -> bool:
        """Whether this rank writes files and speaks: rank 0."""
        return self.rank == 0

    def batches_per_process(self, count: int) -> int:
        """How many of a step's `count` batches each rank takes. Raises PlatformError where they can't take the same."""
        if count % self.size:
            fitting = [n for n in range(1, count + 1) if count % n == 0]
            raise PlatformError(
                f"a step of this run has {count} batches, which {self.size} processes can't share equally",
                f"{' or '.join(map(str, fitting))} of them",
            )
        return count // self.size

    def all_reduce(self, tree: Any) -> Any:
        """The sums over all ranks of a tree of arrays, the same to the bit on each rank; evaluated if there are others.

        Arrays travel together, in messages of about 32 MB. Nothing else is changed where a rank is lost meanwhile:
        raises RankLost.
        """
        if self.size == 1:
            return tree
        eval_arrays(tree)
        return self._exchanged(tree, lambda x: x)

    def broadcast(self, tree: Any) -> Any:
        """Rank 0's arrays on every rank, to the bit. The trees have the same names, shapes and types."""
        if self.size == 1:
            return tree
        eval_arrays(tree)

        def bits(array: mx.array) -> mx.array:
            own = array.view(mx.uint8)
            return own if self.rank == 0 else mx.zeros_like(own)  # the others add nothing

        return self._exchanged(tree, bits)

    def broadcast_object(self, value: Any = None) -> Any:
        """Rank 0's `value`, of JSON's types, on every rank: the others wait for it, using no core. Raises RankLost."""
        if self._pulse is None:
            return value
        if self.rank == 0:
            self._pulse.publish(value)
            return value
        return self._pulse.next_message()

    def peer_status(self, name: str) -> list[Any]:
        """The fact `name` of each of the other ranks that has told it, at most some seconds old."""
        others = self._pulse.peer_status.values() if self._pulse is not None else ()
        return [status[name] for status in list(others) if name in status]

    def wait_for_peer_status(self, name: str) -> list[Any]:
        """The fact `name` of each of the other ranks, once all have told it. Raises RankLost."""
        while len(found := self.peer_status(name)) < self.size - 1:
            if problem := self._pulse.problem(wait=_POLL):
                raise RankLostError(problem)
        return found

    def _exchanged(self, tree: Any, prepared: Callable[[mx.array], mx.array]) -> Any:
        flat = sorted(tree_flatten(tree), key=lambda item: str(item[1].dtype))
        results: list[tuple[str, mx.array]] = []
        with self._together():
            while flat:
                kind, size, count = flat[0][1].dtype, 0, 0
                while count < len(flat) and flat[count][1].dtype == kind and size < _MESSAGE:
                    size += flat[count][1].nbytes
                    count += 1
                part, flat = flat[:count], flat[count:]
                message = mx.concatenate([prepared(array.reshape(-1)) for _, array in part])
                total = mx.distributed.all_sum(message, group=self._group).view(kind)
                ends = np.cumsum([array.size for _, array in part]).tolist()
                pieces = mx.split(total, ends[:-1])
                pieces = [piece.reshape(array.shape) for piece, (_, array) in zip(pieces, part, strict=True)]
                mx.eval(pieces)
                results += [(name, piece) for piece, (name, _) in zip(pieces, part, strict=True)]
        return tree_unflatten(results)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what waits for all ranks: turns MLX's failure into RankLost, and lets `_lost` end it."""
        if problem := self._pulse.problem():
            raise RankLostError(problem)
        self._inside = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            problem = self._pulse.problem(wait=2.0)
            if problem is None and "connection" not in str(error):
                raise
            raise RankLostError(problem or f"the connection to another process was lost ({error})") from None
        finally:
            self._inside = None

    def _lost(self, problem: str) -> None:
        """From the pulse's thread, each second: the main thread may wait for what never comes."""
        if self._inside is None:
            return
        if self._cut is None:
            self._cut = time.monotonic()
            for number in self._sockets:
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        elif time.monotonic() - max(self._cut, self._inside) > _STUCK:
            self._when_stuck(self.on_rank_lost(RankLostError(problem)))

    def _meet(self, backend: str, heartbeat_timeout: float) -> None:
        """Set up the pulse: along the ring, whose neighbours are sure to reach each other, else from all to rank 0."""
        ring = backend == "ring" and self.size > 2
        peers = 1 if ring else self.size - 1 if self.rank == 0 else 0
        card: dict[str, Any] = {"mlxlm": __version__, "mlx": mx.__version__}
        server = None
        if peers:
            address = _own_address(backend, self.rank)
            try:
                server = heartbeat.listen(address, peers)
            except OSError as error:
                raise PlatformError(f"rank {self.rank} can't listen on {address}: {error.strerror}") from None
            card |= {"address": address, "port": server.getsockname()[1]}
        if self.rank == 0:
            card["secret"] = heartbeat.make_secret()
        cards = self._gather(card)
        for other, theirs in enumerate(cards):
            for name in ("mlxlm", "mlx"):
                if theirs[name] != card[name]:
                    versions = f"rank {other} has {name} {theirs[name]}, rank {self.rank} has {card[name]}"
                    raise PlatformError(f"the machines differ: {versions}", "the same versions on all of them")
        secret, links = cards[0]["secret"], []
        target = (self.rank + 1) % self.size if ring else None if self.rank == 0 else 0
        if target is not None:
            where = (cards[target]["address"], cards[target]["port"])
            links.append((heartbeat.connect(where, secret, self.rank, heartbeat_timeout), target))
        if server is not None:
            with server:
                links += heartbeat.accept(server, secret, peers, heartbeat_timeout)
        self._pulse = Heartbeat(self.rank, links, heartbeat_timeout, lambda: self.status(), self._lost)

    def _gather(self, card: dict[str, Any]) -> list[dict[str, Any]]:
        row = json.dumps(card).encode().ljust(_CARD)
        rows = mx.distributed.all_gather(mx.array(np.frombuffer(row, np.uint8))[None], group=self._group)
        return [json.loads(bytes(other)) for other in np.array(rows)]


def _ring_hosts() -> list[list[str]]:
    """MLX_HOSTFILE: for each rank the addresses, with ports, at which the ring reaches it. Of one rank it is empty."""
    path = Path(os.environ["MLX_HOSTFILE"])
    content = bounded_reads.read_bytes(path, 1 << 20, PlatformError)
    try:
        return json.loads(content) if content.strip() else []
    except ValueError:
        raise PlatformError(f"{path}, which MLX_HOSTFILE names, is not JSON", "mlx.launch, which makes it") from None


def _own_address(backend: str, rank: int) -> str:
    """The address at which the backend itself reaches this rank."""
    if backend == "ring":
        return _ring_hosts()[rank][0].rsplit(":", 1)[0]
    if backend == "jaccl":
        return os.environ["MLX_JACCL_COORDINATOR"].rsplit(":", 1)[0]
    return os.environ["NCCL_HOST_IP"] if backend == "nccl" else socket.gethostname()


def _open_sockets() -> set[int]:
    """The file descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the folder's own
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
    return found
