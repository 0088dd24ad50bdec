"""A fake Hub: one dataset repository, served over HTTP to `load_dataset`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

COMMIT = "a" * 40


@contextmanager
def hub(repository: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve a fake Hub with a single dataset, and yield the Hub's address."""
    handler = type("Handler", (_Handler,), {"repository": repository, "repo_files": dict(files)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repository: str
    repo_files: dict[str, bytes]

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)
        api = f"/api/datasets/{self.repository}"
        resolve = f"/datasets/{self.repository}/resolve/"
        if address.path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            names = [{"rfilename": name} for name in self.repo_files]
            self._send_json({"id": self.repository, "sha": COMMIT, "siblings": names})
        elif address.path.startswith(f"{api}/tree/"):
            folder = address.path.removeprefix(f"{api}/tree/{COMMIT}").strip("/")
            self._send_json(self._tree(folder, recursive="recursive=true" in address.query.lower()))
        elif address.path.startswith(f"{api}/paths-info/"):
            json_body = body.startswith(b"{")
            paths = (json.loads(body) if json_body else parse_qs(body.decode()))["paths"]
            self._send_json([entry for path in paths for entry in self._entries(path)])
        elif address.path.startswith(resolve):
            self._send_file(address.path.removeprefix(resolve).partition("/")[2])
        else:
            self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def _tree(self, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
        start = f"{folder}/" if folder else ""
        inner = [name for name in self.repo_files if name.startswith(start)]
        cuts = {name[:place] for name in inner for place, sign in enumerate(name) if sign == "/"}
        paths = [path for path in sorted({*inner, *cuts}) if path.startswith(start)]
        wanted = [path for path in paths if recursive or "/" not in path.removeprefix(start)]
        return [entry for path in wanted for entry in self._entries(path)]

    def _entries(self, path: str) -> list[dict[str, Any]]:
        if path in self.repo_files:
            content = self.repo_files[path]
            return [{"type": "file", "path": path, "size": len(content), "oid": _hash(content)}]
        if any(name.startswith(f"{path}/") for name in self.repo_files):
            return [{"type": "directory", "path": path, "oid": _hash(path.encode())}]
        return []

    def _send_file(self, name: str) -> None:
        if name in self.repo_files:
            content = self.repo_files[name]
            self._send(content, 200, {"ETag": f'"{_hash(content)}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(b"", 404, {"X-Error-Code": "EntryNotFound"})

    def _send_json(self, value: Any) -> None:
        self._send(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def _send(self, body: bytes, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
