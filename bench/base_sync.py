"""Base weights of 1.2 GB to an engine on this machine, the second sync and later ones, against a raw POST of the same
bytes: the same host memory sent over loopback to a program that reads the body and throws it away. Nothing over HTTP
can be faster than that; the sync also hashes on both ends, checks, packs for the kernels and swaps.
"""

import argparse
import json
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.decode import machine  # noqa: E402
from bench.push_model import base_tensors, write_llama  # noqa: E402
from tests.e2e import trainer_package  # noqa: E402
from tools.engine import Engine  # noqa: E402

MODEL = dict(layers=12, hidden=2048, intermediate=5632, head_dim=64, vocab=4096)
SYNCS, BAR = 4, 0.5
BUCKET = 64 << 20

SINK = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
buffer = bytearray(1 << 20)
while True:
    peer, _ = listener.accept()
    head = b""
    while b"\\r\\n\\r\\n" not in head:
        head += peer.recv(1)
    left = int(head.lower().split(b"content-length:")[1].split(b"\\r\\n")[0])
    while left:
        left -= peer.recv_into(buffer, min(left, len(buffer)))
    peer.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    peer.close()
"""


def raw_posts(tensors) -> float:
    """Best GB/s of a few POSTs of all tensors, one after the other from where they lie."""
    import torch

    views = [memoryview(tensor.flatten().view(torch.uint8).numpy()) for tensor in tensors.values()]
    total = sum(map(len, views))
    sink = subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True)
    try:
        port, best = int(sink.stdout.readline()), 0.0
        for _ in range(SYNCS):
            started = time.perf_counter()
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(f"POST / HTTP/1.1\r\nHost: sink\r\nContent-Length: {total}\r\n\r\n".encode())
                for view in views:
                    peer.sendall(view)
                if b" 200 " not in peer.recv(1 << 12):
                    raise SystemExit("bench: the sink did not take the bytes")
            best = max(best, total / (time.perf_counter() - started) / 1e9)
    finally:
        sink.kill()
        sink.wait()
    return best


def measure(headrace, flags=()) -> tuple[float, float]:
    """GB/s of the best sync after the first one, and of the best raw POST."""
    model = write_llama("base-sync-1.2GB", **MODEL)
    config = json.loads((model / "config.json").read_text())
    tensors = base_tensors(config, seed=2)
    total = sum(tensor.nbytes for tensor in tensors.values())
    raw = raw_posts(tensors)
    with Engine(model, *flags, skip_tokenizer=True) as engine, headrace.Publisher(
            engine.url, bucket_bytes=BUCKET) as publisher:
        speeds = []
        for i in range(SYNCS + 1):
            tensors["model.norm.weight"][0] = 1.0 + i / 64  # every sync brings something new
            started = time.perf_counter()
            receipt = publisher.push(base=tensors, complete_base=True, version=f"sync-{i}")
            speeds.append(total / (time.perf_counter() - started) / 1e9)
            if receipt.engines[0].state != "published" or receipt.bytes != total:
                raise SystemExit(f"bench: {receipt}")
        print(f"  base sync of {total / 1e9:.2f} GB in {receipt.tensors} tensors ({receipt.engines[0].base_mode}): "
              + ", ".join(f"{speed:.2f}" for speed in speeds) + f" GB/s; raw POST {raw:.2f} GB/s", flush=True)
    return max(speeds[1:]), raw


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flags", nargs="*", help="flags for the engine, after --")
    flags = parser.parse_args().flags
    print(f"base sync, on {machine()}")
    pushed, raw = measure(trainer_package.load(), flags)
    print(f"  {pushed / raw:.0%} of a raw POST, bar {BAR:.0%}: {'ok' if pushed >= BAR * raw else 'MISSED'}")
    return 0 if pushed >= BAR * raw else 1


if __name__ == "__main__":
    sys.exit(main())
