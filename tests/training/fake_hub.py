"""A hub on this machine: the few addresses that pushing and loading a model ask for, with files kept in memory."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "c0ffee" * 6 + "c0de"


class FakeHub(ThreadingHTTPServer):
    """Repository → its settings and files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.visibility: dict[str, Any] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Stay quiet."""

    def answer(self, value: Any, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), {"Content-Type": "application/json"}, status)

    def send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, what: str) -> None:
        self.send(b"", {"X-Error-Code": what}, 404)

    def do_POST(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        path = urlparse(self.path).path
        if self.headers["Transfer-Encoding"] == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            if name in self.server.files:
                self.answer({"url": f"{self.server.url}/{name}"}, 409)
                return
            self.server.files[name], self.server.visibility[name] = {}, wanted.get("visibility")
            self.answer({"url": f"{self.server.url}/{name}"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            self.answer({"files": modes})
        elif "/commit/" in path:
            name = "/".join(path.split("/")[3:5])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.server.messages.append(line["value"]["summary"])
                else:
                    assert line["key"] == "file", line
                    self.server.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.missing("EntryNotFound")

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            name = "/".join(parts[2:4])
            files = self.server.files.get(name)
            if files is None:
                self.missing("RepoNotFound")
            elif "tree" in parts:
                inside = "".join(f"{part}/" for part in parts[6:])
                found = {file: content for file, content in files.items() if file.startswith(inside)}
                entries = [
                    {"type": "file", "path": file, "size": len(content), "oid": digest(content)}
                    for file, content in found.items()
                ]
                self.answer(entries)
            else:
                self.answer({"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]})
            return
        name, file = "/".join(parts[:2]), "/".join(parts[4:])
        if name not in self.server.files:
            self.missing("RepoNotFound")
        elif file not in self.server.files[name]:
            self.send(b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, 404)
        else:
            content = self.server.files[name][file]
            self.send(content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET  # noqa: N815


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that answers while this lasts."""
    with FakeHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
