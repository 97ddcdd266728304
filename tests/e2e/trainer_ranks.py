"""One rank of several trainer processes that publish as one. RANK, WORLD_SIZE and MASTER_PORT are in the environment.

python trainer_ranks.py CASE MODEL_DIR URL...: the last line of output is the outcome as JSON.
"""

import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

import torch.distributed as dist  # noqa: E402

import headrace  # noqa: E402
from tests.e2e.trainer_model import Learner  # noqa: E402


def own_part(tensors, rank, size):
    """Layers are spread over the ranks, as pipeline stages are."""
    return {key: tensor for key, tensor in tensors.items() if int(key.split("layers.")[1].split(".")[0]) % size == rank}


def main() -> None:
    case, model, *urls = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank=rank,
                            world_size=size)
    learner = Learner(model)
    learner.step()
    tensors, config, unchanged = learner.adapter(), learner.config(), False
    if case == "replicas":
        mine = tensors
    elif case == "diverged":
        mine = {key: tensor + (rank == 1) * 1e-3 for key, tensor in tensors.items()}
    elif case == "failing":
        mine = own_part(tensors, rank, size)
        if rank == 1:
            mine["base_model.model.broken.lora_A.weight"] = "not a tensor"
            mine = {key: mine[key] for key in sorted(mine, key=lambda key: "broken" not in key)}
    elif case == "unchanged":
        mine, unchanged = own_part(tensors, rank, size), True
    elif case == "one has nothing":
        mine = tensors if rank == 0 else {}
    else:
        mine = own_part(tensors, rank, size)

    publisher = headrace.Publisher(urls, group=dist.group.WORLD, timeout=10)
    started = time.monotonic()
    try:
        receipt = publisher.push(mine, adapter="shared", config=config, version="ranks-1", unchanged=unchanged)
        outcome = {"tensors": receipt.tensors, "sent": receipt.sent_tensors, "rank": receipt.rank,
                   "ranks": receipt.ranks, "skipped": receipt.skipped, "xxh3": receipt.xxh3}
    except (headrace.HeadraceError, TypeError, AttributeError) as error:
        outcome = {"error": type(error).__name__, "status": getattr(error, "status", None), "message": str(error)}
    outcome["seconds"] = time.monotonic() - started
    dist.barrier()
    publisher.close()
    print(json.dumps(outcome), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
