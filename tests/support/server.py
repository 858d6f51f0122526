"""A web server in this process that is also an S3, a Google and an Azure store: objects in a dict, faults on demand, every
request noted."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse
from xml.sax.saxutils import escape

AZURE_ACCOUNT = "/devstoreaccount1"
"""What Azure's emulator puts before a container."""


class Server:
    """objects: path ("/bucket/key") -> content. faults: the next GETs, each taken by one of these functions in turn."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"
        self.objects: dict[str, bytes] = {}
        self.faults: list[Callable[[Request, bytes], None]] = []
        self.requests: list[tuple[str, str, str]] = []
        """(method, path, range)."""
        self.etags = True
        self.lock = threading.Lock()

    def etag(self, path: str) -> str:
        return '"' + hashlib.md5(self.objects[path], usedforsecurity=False).hexdigest() + '"'

    def gets(self, path: str) -> list[str]:
        """Ranges of the GETs of a path."""
        return [given for method, asked, given in self.requests if (method, asked) == ("GET", path)]


class Request(BaseHTTPRequestHandler):
    """Answers from the `Server` that its class has."""

    state: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        asked = urlparse(self.path)
        path = unquote(asked.path).removeprefix(AZURE_ACCOUNT)
        with self.state.lock:
            self.state.requests.append((self.command, path, self.headers.get("Range", "")))
            fault = self.state.faults.pop(0) if body and self.state.faults and path in self.state.objects else None
        query = parse_qs(asked.query)
        if "list-type" in query:  # S3 and Google
            return self.listing(path.strip("/"), query.get("prefix", [""])[0])
        if query.get("comp") == ["list"]:
            return self.azure_listing(path.strip("/"), query.get("prefix", [""])[0])
        if path not in self.state.objects:
            return self.reply(404, b"")
        content = self.state.objects[path]
        if fault is not None:
            return fault(self, content)
        if self.headers.get("If-Match") not in (None, self.state.etag(path)):
            return self.reply(412, b"")
        start, end = self.range(len(content))
        partial = self.headers.get("Range") is not None
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"} if partial else {}
        self.reply(206 if partial else 200, content[start:end], headers, body=body)

    def range(self, size: int) -> tuple[int, int]:
        given = self.headers.get("Range")
        if given is None:
            return 0, size
        first, _, last = given.removeprefix("bytes=").partition("-")
        return int(first), min(int(last) + 1, size) if last else size

    def reply(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str] | None = None,
        *,
        body: bool = True,
        length: int | None = None,
    ) -> None:
        path = unquote(urlparse(self.path).path).removeprefix(AZURE_ACCOUNT)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.send_header("Last-Modified", "Sat, 01 Jan 2022 00:00:00 GMT")
        if self.state.etags and path in self.state.objects:
            self.send_header("ETag", self.state.etag(path))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)
            if length is not None and length != len(content):
                self.close_connection = True

    def keys(self, bucket: str, prefix: str) -> list[str]:
        keys = sorted(path[len(bucket) + 2 :] for path in self.state.objects if path.startswith(f"/{bucket}/"))
        return [key for key in keys if key.startswith(prefix)]

    def listing(self, bucket: str, prefix: str) -> None:
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2022-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(self.state.etag(f'/{bucket}/{key}'))}</ETag>"
            f"<Size>{len(self.state.objects[f'/{bucket}/{key}'])}</Size></Contents>"
            for key in self.keys(bucket, prefix)
        )
        text = f"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
        self.reply(200, text.encode(), {"Content-Type": "application/xml"})

    def azure_listing(self, bucket: str, prefix: str) -> None:
        items = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>Sat, 01 Jan 2022 00:00:00 GMT</Last-Modified>"
            f"<Etag>{escape(self.state.etag(f'/{bucket}/{key}'))}</Etag><Content-Type>text/plain</Content-Type>"
            f"<Content-Length>{len(self.state.objects[f'/{bucket}/{key}'])}</Content-Length></Properties></Blob>"
            for key in self.keys(bucket, prefix)
        )
        text = f"<?xml version='1.0'?><EnumerationResults><Blobs>{items}</Blobs><NextMarker /></EnumerationResults>"
        self.reply(200, text.encode(), {"Content-Type": "application/xml"})


@contextmanager
def serving():
    """A `Server` that answers for as long as this lasts."""
    handler = type("Handler", (Request,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.state = Server(server.server_address[1])  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield handler.state  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
