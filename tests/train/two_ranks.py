"""One of two processes of test_distributed.py: prints its collectives as JSON, then rank 1 ends without a word."""

import json
import os

import mlxlm  # noqa: F401 - first, so that MLX gets a fast BLAS
from mlxlm.backend.mlx import mx
from mlxlm.backend.process_group import RankLostError, join_process_group

with join_process_group() as group:
    mine = float(group.rank + 1)
    tree = {"a": mx.full((3, 4), mine), "b": [mx.array(10 * mine), mx.full((50,), mine)]}
    group.should_stop = lambda: group.rank == 1
    mean = group.average(tree)
    sent = group.broadcast([mx.array([0.1, float("nan"), mine]), mx.array(group.rank + 5), mx.array([mine])])
    found = {
        "rank": [group.rank, group.size],
        "average": [mean["a"].tolist(), [x.tolist() for x in mean["b"]]],
        "broadcast": [sent[0].view(mx.uint32).tolist(), sent[1].item(), sent[2].tolist()],
        "objects": [group.broadcast_object({"n": i, "by": group.rank, "long": "x" * 1000 * i}) for i in range(3)],
        "stop": group.stop_requested,
    }
    print(json.dumps(found), flush=True)
    if group.rank == 1:
        os._exit(0)
    try:
        group.average(tree)
    except RankLostError as error:
        print(json.dumps({"error": str(error), "a": tree["a"].tolist()}), flush=True)
