"""One of two processes of tests/train/test_ranks.py: what its collectives gave, as JSON, then how it loses the other.

The first argument is "cut", where a hanging rank's connections are cut, or "stuck", where that has no effect.
"""

import json
import os
import signal
import sys

import mlxlm  # noqa: F401 - first, so that MLX gets a fast BLAS
from mlxlm.backend.mlx import mx
from mlxlm.train import RankLost, Ranks
from mlxlm.train.distributed import process_group as module
from mlxlm.utils.errors import TrainingError


def stuck(error: Exception) -> None:
    print(json.dumps({"stuck": str(error)}), flush=True)
    os._exit(7)


with Ranks.join(stuck, patience=4.0) as ranks:
    mine = float(ranks.rank + 1)
    module._MESSAGE = 64  # bytes: several messages
    tree = {"a": mx.full((3, 4), mine), "b": [mx.array(10 * mine), mx.full((50,), mine, mx.bfloat16)], "c": mx.array(7)}
    total = ranks.summed(tree)
    sent = ranks.broadcast(
        [mx.array([-0.0, float("nan"), mine]), mx.array(ranks.rank + 5), mx.array([mine], mx.float16)]
    )
    ranks.facts = lambda: {"rank": ranks.rank}
    print(
        json.dumps(
            {
                "rank": [ranks.rank, ranks.size, ranks.writes],
                "summed": [total["a"].tolist(), [x.astype(mx.float32).tolist() for x in total["b"]], total["c"].item()],
                "dtypes": [str(x.dtype) for x in (total["a"], *total["b"], total["c"])],
                "broadcast": [sent[0].view(mx.uint32).tolist(), sent[1].item(), sent[2].tolist()],
                "shared": [ranks.share({"n": i, "by": ranks.rank}) for i in range(3)],
            }
        ),
        flush=True,
    )
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    weights = mx.random.normal((100, 100))
    mx.eval(weights)
    if sys.argv[1] == "stuck":
        module._STUCK, ranks._sockets = 0.2, set()

        def rescue(lost: RankLost) -> TrainingError:
            mx.save_safetensors(sys.argv[2], {"weights": weights})
            return TrainingError(f"saved: {lost.message}")

        ranks.rescue = rescue
    try:
        ranks.summed(tree)
    except RankLost as lost:
        # MLX works on after a collective that failed.
        print(json.dumps({"lost": str(lost), "sum": mx.abs(weights).sum().item() > 0}), flush=True)
        sys.exit(1)
