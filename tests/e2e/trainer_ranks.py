"""One rank of several trainer processes that publish as one. RANK, WORLD_SIZE and MASTER_PORT are in the environment.

python trainer_ranks.py MODEL_DIR. Each line of its input is "CASE URL...", and is answered with the outcome as JSON.
"""

import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

import headrace  # noqa: E402
from tests.e2e.trainer_model import Learner  # noqa: E402


def own_part(tensors, rank, size):
    """Layers are spread over the ranks, as pipeline stages are."""
    return {key: tensor for key, tensor in tensors.items() if int(key.split("layers.")[1].split(".")[0]) % size == rank}


def holdings(case, tensors, rank, size) -> dict:
    """What this rank has of the adapter."""
    part = own_part(tensors, rank, size)
    if case == "replicas":
        return tensors
    if case == "diverged":
        return {key: tensor + (rank == 1) * 1e-3 for key, tensor in tensors.items()}
    if case == "nothing":
        return tensors if rank == 0 else {}
    if case == "sharded":  # as FSDP holds them
        mesh = init_device_mesh("cpu", (size,))
        return {key: distribute_tensor(tensor, mesh, [Shard(0)]) for key, tensor in tensors.items()}
    if case == "no-tensor" and rank == 1:
        return {"base_model.model.broken.lora_A.weight": "not a tensor", **part}
    if case == "fails-late" and rank == 1:
        return {**part, "base_model.model.broken.lora_A.weight": torch.zeros(8, 64, dtype=torch.complex64)}
    return part


def push(case, learner, urls, rank, size) -> dict:
    mine, started = holdings(case, learner.adapter(), rank, size), time.monotonic()
    with headrace.Publisher(urls, group=dist.group.WORLD, timeout=10) as publisher:
        try:
            receipt = publisher.push(mine, adapter="shared", config=learner.config(), version=case,
                                     unchanged=case == "unchanged" or case == "one-unchanged" and rank == 0)
            outcome = {"tensors": receipt.tensors, "sent": receipt.sent_tensors, "rank": receipt.rank,
                       "ranks": receipt.ranks, "skipped": receipt.skipped, "xxh3": receipt.xxh3,
                       "published": receipt.published, "text": str(receipt)}
        except (headrace.HeadraceError, TypeError) as error:
            outcome = {"error": type(error).__name__, "status": getattr(error, "status", None), "message": str(error)}
    return {**outcome, "seconds": time.monotonic() - started}


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank=rank,
                            world_size=size)
    learner = Learner(sys.argv[1])
    learner.step()
    for line in sys.stdin:
        case, *urls = line.split()
        print(json.dumps(push(case, learner, urls, rank, size)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
