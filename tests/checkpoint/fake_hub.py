"""A server on this machine that answers huggingface_hub as the hub does, for one repository."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves `files`, {name: content}, for any commit; after `stall_after` bytes of a larger file it sends no more."""

    def __init__(self, files: dict[str, bytes], stall_after: int | None = None):
        self.files, self.stall_after = files, stall_after
        self.etags: dict[str, str] = {}  # where they aren't the SHA-256 of the content
        self.ranges: list[str] = []
        self.sent = 0  # bytes of files
        self.created: list[dict] = []  # requests for new repositories
        self.stalled, self._closed = threading.Event(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(hub):
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.answer(with_body=False)

            def do_GET(self):
                self.answer(with_body=True)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Authorization") != "Bearer hf_token":
                    self.send_json({"error": "Invalid username or password."}, status=401)
                elif self.path == "/api/repos/create":
                    hub.created.append(json.loads(body))
                    self.send_json({"url": f"{hub.endpoint}/owner/name", "id": "owner/name"})
                elif self.path == "/api/validate-yaml":
                    self.send_json({"errors": [], "warnings": []})
                elif "/preupload/" in self.path:
                    names = [file["path"] for file in json.loads(body)["files"]]
                    modes = {"uploadMode": "regular", "shouldIgnore": False}
                    self.send_json({"files": [{"path": name, **modes} for name in names]})
                elif "/commit/" in self.path:
                    for line in map(json.loads, body.splitlines()):
                        if line["key"] == "file":
                            hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                        elif line["key"] == "deletedFile":
                            del hub.files[line["value"]["path"]]
                    url = f"{hub.endpoint}/owner/name/commit/{COMMIT}"
                    self.send_json({"commitUrl": url, "commitOid": COMMIT, "success": True})

            def answer(self, with_body):
                name = re.fullmatch(r"(?:/datasets)?/[^/]+/[^/]+/resolve/[^/]+/(.+)", self.path)
                if name is not None:
                    self.send_file(name[1], with_body)
                elif re.match("/api/datasets/(?!owner/name)", self.path):
                    gated = "/gated" in self.path
                    headers = {"X-Error-Code": "GatedRepo" if gated else "RepoNotFound"}
                    self.send_json({}, 403 if gated else 404, headers)
                elif tree := re.match(r"/api/\w+/[^/]+/[^/]+/tree/[^/?]+/?([^?]*)(.*)", self.path):
                    self.send_tree(*tree.groups())
                elif self.path.startswith(("/api/models/", "/api/datasets/")):
                    ids = dict.fromkeys(("id", "modelId"), "owner/name")
                    siblings = [{"rfilename": n, "size": len(c)} for n, c in hub.files.items()]
                    self.send_json({**ids, "sha": hub.commit(self.path), "siblings": siblings})
                else:
                    self.send_json({})

            def send_tree(self, folder, query):
                names = [n for n in hub.files if n.startswith(folder and folder + "/")]
                folders = {n[:at] for n in names for at in range(len(folder) + 1, len(n)) if n[at] == "/"}
                entries = [{"type": "directory", "path": n, "size": 0, "oid": sha1(b"")} for n in folders]
                for name in names:
                    content = hub.files[name]
                    entries.append({"type": "file", "path": name, "size": len(content), "oid": sha1(content)})
                if "recursive=true" not in query.lower():
                    entries = [e for e in entries if "/" not in e["path"].removeprefix(folder + "/" if folder else "")]
                missing = {"X-Error-Code": "EntryNotFound"}
                self.send_json(entries) if names else self.send_json({}, 404, missing)

            def send_json(self, value, status=200, headers=()):
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                for header in dict(headers).items():
                    self.send_header(*header)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def send_file(self, name, with_body):
                if (content := hub.files.get(name)) is None:
                    self.send_response(404)
                    self.send_header("X-Error-Code", "EntryNotFound")
                    self.end_headers()
                    return
                start, stop = 0, len(content)
                if range := self.headers.get("Range"):
                    hub.ranges.append(range)
                    first, last = re.match(r"bytes=(\d+)-(\d*)", range).groups()
                    start, stop = int(first), min(int(last or stop) + 1, stop)
                self.send_response(206 if range else 200)
                self.send_header("ETag", f'"{hub.etags.get(name) or hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", hub.commit(self.path))
                self.send_header("Content-Length", str(stop - start))
                if range:
                    self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
                self.end_headers()
                if not with_body:
                    return
                if hub.stall_after is None or len(content) <= hub.stall_after:
                    hub.sent += stop - start
                    self.wfile.write(content[start:stop])
                    return
                self.wfile.write(content[start : hub.stall_after])
                self.wfile.flush()
                hub.stalled.set()
                hub._closed.wait(60)

            def log_message(self, *_):
                pass

        return Handler

    @staticmethod
    def commit(path):
        """The commit in a path, or that of the branch."""
        return next(iter(re.findall(r"/([0-9a-f]{40})(?:/|$)", path)), COMMIT)


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
