"""A Hugging Face hub on this machine that has one model, for tests: what it is asked when a model is fetched."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_with(name: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """(address for HF_ENDPOINT, the requests so far) of a hub that has the files of `folder` as model `name`."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            self.path = self.path.partition("?")[0]
            of_model, of_file = f"/api/models/{name}", f"/{name}/resolve/{COMMIT}/"
            if self.path == f"{of_model}/revision/main":
                listing = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
                self._send(200, json.dumps(listing).encode(), "application/json")
            elif self.path == f"{of_model}/tree/{COMMIT}":
                tree = [{"type": "file", "path": file, "size": len(body), "oid": _digest(body)} for file, body in files.items()]
                self._send(200, json.dumps(tree).encode(), "application/json")
            elif self.path.startswith(of_file) and self.path.removeprefix(of_file) in files:
                self._send(200, files[self.path.removeprefix(of_file)], "application/octet-stream")
            else:
                self._send(404, b"{}", "application/json")

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            headers = {"Content-Type": kind, "Content-Length": len(body), "X-Repo-Commit": COMMIT}
            headers["ETag"] = f'"{_digest(body)}"'
            for header, value in headers.items():
                self.send_header(header, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
