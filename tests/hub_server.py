"""A small Hugging Face Hub: an HTTP server that answers what its library asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
TOKEN = "hf_letmein"


@contextmanager
def serve(
    datasets: Mapping[str, Mapping[str, bytes]],
    models: Mapping[str, Mapping[str, bytes]],
    *,
    gated: tuple[str, ...] = (),
) -> Iterator[tuple[str, list[str]]]:
    """Serve repositories (name -> path -> bytes); give the endpoint and the list of requests.

    The branch main of each is COMMIT, its tag v1 OTHER_COMMIT, with the same files. A gated
    one shows its listing to all and its files to nobody: 401 without a token, 403 with one.
    """
    requests: list[str] = []
    repositories = {"datasets": datasets, "models": models}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            return

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            requests.append(f"{self.command} {path}")
            words = path.split("/")
            is_api = words[0] == "api"
            words = words[1:] if is_api else words
            kind = words.pop(0) if words[0] in repositories else "models"
            name, rest = "/".join(words[:2]), words[2:]
            files = repositories[kind].get(name)
            if files is None:
                self.fail(401, "RepoNotFound")
            elif rest[1:] and rest[1] not in ("main", "v1", COMMIT, OTHER_COMMIT):
                self.fail(404, "RevisionNotFound")
            elif is_api:
                self.describe(name, files, rest)
            elif name in gated:
                self.fail(403 if self.headers.get("authorization") else 401, "GatedRepo")
            elif "/".join(rest[2:]) in files:
                self.send(files["/".join(rest[2:])], commit=commit_of(rest))
            else:
                self.fail(404, "EntryNotFound", commit=commit_of(rest))

        def describe(self, name: str, files: Mapping[str, bytes], rest: list[str]) -> None:
            if rest[:1] == ["tree"]:
                entries = [
                    {"type": "file", "path": p, "size": len(b), "oid": etag_of(b)}
                    for p, b in files.items()
                ]
                self.send(json.dumps(entries).encode(), kind="application/json")
                return
            siblings = [{"rfilename": path} for path in files]
            info = {"id": name, "sha": commit_of(rest), "siblings": siblings, "tags": []}
            self.send(json.dumps(info).encode(), kind="application/json")

        def send(self, body: bytes, *, kind: str = "text/plain", commit: str = "") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{etag_of(body)}"')
            if commit:
                self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def fail(self, status: int, code: str, *, commit: str = "") -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            if commit:
                self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag_of(body: bytes) -> str:
    """Return the name that git gives a content."""
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def commit_of(rest: list[str]) -> str:
    """Return the commit of `revision/NAME`, `resolve/NAME/...`, or nothing (main)."""
    return OTHER_COMMIT if rest[1:2] in (["v1"], [OTHER_COMMIT]) else COMMIT
