"""One of two processes of test_process_group.py: prints its collectives as JSON, then how it loses the other.

The first argument is "cut", where a hanging rank's connections are cut, or "stuck", where that has no effect.
"""

import json
import os
import signal
import sys

import mlxlm  # noqa: F401 - first, so that MLX gets a fast BLAS
from mlxlm.backend.mlx import mx
from mlxlm.train import ProcessGroup, RankLostError
from mlxlm.train.distributed import process_group as module
from mlxlm.utils.errors import TrainingError


def stuck(error: Exception) -> None:
    print(json.dumps({"stuck": str(error)}), flush=True)
    os._exit(7)


with ProcessGroup.join(stuck, heartbeat_timeout=4.0) as process_group:
    mine = float(process_group.rank + 1)
    module._MESSAGE_BYTES = 64  # bytes: several messages
    tree = {"a": mx.full((3, 4), mine), "b": [mx.array(10 * mine), mx.full((50,), mine, mx.bfloat16)], "c": mx.array(7)}
    total = process_group.all_reduce(tree)
    sent = process_group.broadcast(
        [mx.array([-0.0, float("nan"), mine]), mx.array(process_group.rank + 5), mx.array([mine], mx.float16)]
    )
    process_group.status = lambda: {"rank": process_group.rank}
    print(
        json.dumps(
            {
                "rank": [process_group.rank, process_group.size, process_group.is_main_process],
                "all_reduce": [
                    total["a"].tolist(),
                    [x.astype(mx.float32).tolist() for x in total["b"]],
                    total["c"].item(),
                ],
                "dtypes": [str(x.dtype) for x in (total["a"], *total["b"], total["c"])],
                "broadcast": [sent[0].view(mx.uint32).tolist(), sent[1].item(), sent[2].tolist()],
                "shared": [process_group.broadcast_object({"n": i, "by": process_group.rank}) for i in range(3)],
            }
        ),
        flush=True,
    )
    if process_group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    weights = mx.random.normal((100, 100))
    mx.eval(weights)
    if sys.argv[1] == "stuck":
        module._HANG_TIMEOUT, process_group._sockets = 0.2, set()

        def on_rank_lost(lost: RankLostError) -> TrainingError:
            mx.save_safetensors(sys.argv[2], {"weights": weights})
            return TrainingError(f"saved: {lost.message}")

        process_group.on_rank_lost = on_rank_lost
    try:
        process_group.all_reduce(tree)
    except RankLostError as lost:
        # MLX works on after a collective that failed.
        print(json.dumps({"lost": str(lost), "sum": mx.abs(weights).sum().item() > 0}), flush=True)
        sys.exit(1)
