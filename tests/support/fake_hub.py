"""A hub that answers on localhost, for downloads without a network."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(files: dict[str, bytes], status: int = 200, code: str = ""):
    """As much of the hub's HTTP interface as a download needs; `status` and `code` refuse everything."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.split("?")[0]
            if status != 200:
                return self.reply(b"{}", status)
            if "/tree/" in path:
                return self.reply(json.dumps([
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]).encode())  # fmt: skip
            if path.startswith("/api/models/owner/name"):
                siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                return self.reply(json.dumps({"id": "owner/name", "sha": SHA, "siblings": siblings}).encode())
            name = path.rpartition("/")[2]
            return self.reply(files[name]) if name in files else self.reply(b"", 404)

        do_HEAD = do_GET

        def reply(self, data: bytes, answer: int = 200):
            self.send_response(answer)
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": SHA}
            headers |= {"Content-Length": str(len(data)), "Content-Type": "application/json"}
            if code:
                headers["X-Error-Code"] = code
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
