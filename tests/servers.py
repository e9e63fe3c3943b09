"""Servers of files on this machine that can be told to misbehave."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["FileServer", "Request", "s3_server"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was asked, and how many bytes of a body went out."""

    method: str
    path: str
    range: str | None
    sent: int


@dataclass
class FileServer:
    """Serves ``files`` by path on loopback; a context manager.

    Attributes:
        files: bytes by path, with its slash; PUT adds to them, but not to ``/refused``.
        faults: what to do wrong, one for each coming request: drop, truncate, stall, ignore-range,
            wrong-range, too-much, an HTTP status, or ``""`` for nothing.
        always: what to do wrong with every request, after the faults.
        requests: what was asked so far.
        redirects: where a path is redirected to.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    always: str = ""
    requests: list[Request] = field(default_factory=list)
    redirects: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> FileServer:
        self._released = threading.Event()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    @property
    def sent(self) -> int:
        """Bytes of bodies that went out."""
        return sum(request.sent for request in self.requests)

    def next_fault(self) -> str:
        return self.faults.pop(0) if self.faults else self.always

    def stall(self) -> None:
        self._released.wait(30)


class _Handler(BaseHTTPRequestHandler):
    owner: FileServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_PUT(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/refused"):
            self._note(0)
            self._head(405, {"Content-Length": "0"})
            return
        self.owner.files[self.path.partition("?")[0]] = data
        self._note(0)
        self._head(201, {"Content-Length": "0"})

    def log_message(self, *arguments: Any) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        fault = self.owner.next_fault()
        if fault == "stall":
            self._note(0)
            self.owner.stall()
            self.close_connection = True
            return
        if path in self.owner.redirects:
            self._note(0)
            self._head(302, {"Location": self.owner.redirects[path], "Content-Length": "0"})
            return
        if fault.isdigit() or path not in self.owner.files:
            self._note(0)
            self._head(int(fault) if fault.isdigit() else 404, {"Content-Length": "0"})
            return
        self._send(self.owner.files[path], fault, body=body)

    def _send(self, whole: bytes, fault: str, *, body: bool) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        headers = {}
        part, status = whole, 200
        if asked and fault != "ignore-range":
            start, stop = int(asked[1]), min(int(asked[2]) + 1, len(whole))
            shift = 1 if fault == "wrong-range" else 0
            more = 7 if fault == "too-much" else 0
            part, status = whole[start - shift * (start > 0) : stop - shift + more], 206
            if fault == "wrong-range" and not start:
                part = whole[1 : stop + 1]
            if fault == "truncate":
                part = part[: len(part) // 2]
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(whole)}"
        headers["Content-Length"] = str(len(part))
        if not body:
            self._note(0)
            self._head(status, headers)
            return
        if fault == "drop":
            part = part[: len(part) // 2]
            self.close_connection = True
        self._note(len(part))
        self._head(status, headers)
        # A client may have seen enough.
        with contextlib.suppress(ConnectionError):
            self.wfile.write(part)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _note(self, sent: int) -> None:
        self.owner.requests.append(
            Request(method=self.command, path=self.path, range=self.headers.get("Range"), sent=sent)
        )


@contextlib.contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, str]]:
    """An S3 server in a process of its own, with one bucket; the environment with which it is reached."""
    import boto3

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, **environment})
    try:
        client = boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
            except OSError:
                assert time.monotonic() < deadline, "the S3 server does not start"
                time.sleep(0.1)
        client.create_bucket(Bucket=bucket)
        yield environment
    finally:
        server.terminate()
        server.wait()
