"""A client that has one request generate all the time, for bench/push.py: a process of its own, so that what the
publisher's process does (one Python thread runs at a time) delays no stamp.

    python bench/stream_stamps.py PORT

Prints the time of every token (time.perf_counter, the same clock in all processes), one a line, and an empty line where
a new request begins, when its standard input is closed.
"""

import http.client
import json
import sys
import threading
import time

BODY = json.dumps({"input_ids": [7, 9], "stream": True, "sampling_params": {
    "max_new_tokens": 2000, "temperature": 0.0, "ignore_eos": True}}).encode()


def main() -> None:
    stamps, stop = [], threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    while not stop.is_set():
        connection.request("POST", "/generate", BODY, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        stamps.append("")
        while not stop.is_set() and (line := reply.readline()):
            if line.startswith(b"data: {"):
                stamps.append(repr(time.perf_counter()))
        if stop.is_set():
            connection.close()
    print("\n".join(stamps))


if __name__ == "__main__":
    main()
