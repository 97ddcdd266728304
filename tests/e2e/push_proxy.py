"""Stands between a publisher and an engine: hands calls on, and loses or delays them as a test says. And an engine that
is only its routes, for what a real one does not show: what came in, word for word."""

import http.client
import http.server
import json
import threading
import time


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status, payload, kind="application/json"):
        if not isinstance(payload, bytes):
            payload = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def handle_call(self):
        self.server.owner.handle(self, self.command, self.path, self.body())

    do_GET = do_POST = do_OPTIONS = handle_call


class Server:
    def __init__(self):
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.owner = self
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.http.shutdown()
        self.http.server_close()


class Proxy(Server):
    """faults: {route: [what happens to its calls, one after the other]}; "ok" or an end of the list: nothing;
    "lose call", "lose reply", or seconds to wait before it is handed on. The last one given as "... for ever" stays."""

    def __init__(self, engine, **faults):
        self.engine = engine
        self.faults = {route: list(each) for route, each in faults.items()}
        self.seen = []
        super().__init__()

    def fault(self, route):
        each = self.faults.get(route)
        if not each:
            return "ok"
        return each[0].removesuffix(" for ever") if str(each[0]).endswith(" for ever") else each.pop(0)

    def handle(self, handler, method, path, body):
        route = path.split("?")[0].strip("/")
        self.seen.append(route)
        fault = self.fault(route)
        if fault == "lose call":
            handler.close_connection = True
            return
        if isinstance(fault, (int, float)):
            time.sleep(fault)
        connection = http.client.HTTPConnection("127.0.0.1", self.engine.port, timeout=60)
        headers = {key: value for key, value in handler.headers.items() if key.lower() not in ("host", "connection")}
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        payload = reply.read()
        connection.close()
        if fault == "lose reply":
            handler.close_connection = True
            return
        handler.answer(reply.status, payload, reply.headers.get("Content-Type", "application/json"))


class Recorder(Server):
    """An engine of SGLang that answers success to everything but what `replies` says: {route: (status, payload)}."""

    def __init__(self, keep=True, **replies):
        self.replies, self.keep, self.calls = {"server_info": (200, {"tp_size": 1}), **replies}, keep, []
        super().__init__()

    def handle(self, handler, method, path, body):
        route = path.split("?")[0].strip("/")
        self.calls.append((method, route, body if self.keep else len(body)))
        handler.answer(*self.replies.get(route, (200, {"success": True, "message": "ok"})))

    def bodies(self, route):
        return [json.loads(body) for _, name, body in self.calls if name == route]
