"""A program that reads payloads as a rank of an inference engine does: base64, then unpickling, with torch alone.

Each line of its input is "read FILE" or "drop"; the answer is the SHA-256 over all tensors, or "FAIL" and the error, or
"dropped" once it holds nothing of the payload any more.
"""

import base64
import gc
import hashlib
import pathlib
import pickle
import sys

import torch
import torch.multiprocessing  # noqa: F401  registers what payloads refer to


def digest(tensors) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    tensors = None
    print("ready", flush=True)
    for line in sys.stdin:
        verb, _, path = line.strip().partition(" ")
        try:
            if verb == "read":
                tensors = pickle.loads(base64.b64decode(pathlib.Path(path).read_text()))
                print(digest(tensors), flush=True)
            else:
                tensors = None
                gc.collect()
                print("dropped", flush=True)
        except Exception as error:  # the fault is what is looked for
            print("FAIL", type(error).__name__, str(error).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
