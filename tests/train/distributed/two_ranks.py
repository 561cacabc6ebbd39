"""One of two processes of test_process_group.py: prints its collectives as JSON; then rank 1 hangs.

The argument is the file that rank 0 saves when it has lost rank 1.
"""

import json
import os
import signal
import sys

import mlxlm  # noqa: F401 - first, so that MLX gets a fast BLAS
from mlxlm.backend.mlx import mx
from mlxlm.train import RankLostError, join_process_group
from mlxlm.train.distributed import process_group as module
from mlxlm.utils.errors import TrainingError


def on_hang(error: Exception) -> None:
    print(json.dumps({"error": str(error)}), flush=True)
    os._exit(7)


module._MESSAGE_BYTES = 64  # several messages
module._HANG_TIMEOUT = 0.2
with join_process_group(on_hang, heartbeat_timeout=2.0) as group:
    mine = float(group.rank + 1)
    tree = {"a": mx.full((3, 4), mine), "b": [mx.array(10 * mine), mx.full((50,), mine, mx.bfloat16)], "c": mx.array(7)}
    total = group.all_reduce(tree)
    sent = group.broadcast([mx.array([0.1, float("nan"), mine]), mx.array(group.rank + 5), mx.array([mine])])
    group.status = lambda: {"load": group.rank}
    found = {
        "rank": [group.rank, group.size, group.is_main_process],
        "all_reduce": [total["a"].tolist(), [x.astype(mx.float32).tolist() for x in total["b"]], total["c"].item()],
        "dtypes": [str(x.dtype) for x in (total["a"], *total["b"], total["c"])],
        "broadcast": [sent[0].view(mx.uint32).tolist(), sent[1].item(), sent[2].tolist()],
        "status": group.wait_for_peer_status("load") if group.is_main_process else None,
        "objects": [group.broadcast_object({"n": i, "by": group.rank}) for i in range(3)],
    }
    print(json.dumps(found), flush=True)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    weights = mx.random.normal((100, 100))
    mx.eval(weights)

    def on_rank_lost(lost: RankLostError) -> TrainingError:
        mx.save_safetensors(sys.argv[1], {"weights": weights})
        return TrainingError(f"saved: {lost.message}")

    group.on_rank_lost = on_rank_lost
    group.all_reduce(tree)
