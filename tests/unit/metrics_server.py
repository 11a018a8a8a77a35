"""A real HTTP server on this machine that answers as it is told, one answer per request."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "monitor"
IDLE = (DATA / "vllm-0.30-idle.txt").read_text()
AFTER = (DATA / "vllm-0.30-after.txt").read_text()
OMNI = (DATA / "vllm-omni-0.30.txt").read_text()

Answer = Callable[[BaseHTTPRequestHandler], None]


def page(
    text: str | bytes,
    kind: str = "text/plain; version=0.0.4",
    status: int = 200,
    packed: str | None = None,
) -> Answer:
    content = text if isinstance(text, bytes) else text.encode()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        if packed is not None:
            handler.send_header("Content-Encoding", packed)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def redirect(to: str, status: int = 307) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Location", to)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def dripping(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then, for ever: no read ever takes long."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"# \n")
        time.sleep(0.05)


def endless(handler: BaseHTTPRequestHandler) -> None:
    """Of a size that is not announced."""
    handler.send_response(200)
    handler.end_headers()
    chunk = b"# a comment that goes on and on\n" * 4096
    while True:
        handler.wfile.write(chunk)


def cut_off(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(b"# HELP")
    handler.close_connection = True


class MetricsServer:
    """`seen`: path and headers of each request."""

    def __init__(self, answers: Sequence[Answer], host: str) -> None:
        self.seen: list[tuple[str, dict[str, str]]] = []
        self._answers = list(answers)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                number = len(outer.seen)
                outer.seen.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                answer = outer._answers[min(number, len(outer._answers) - 1)]
                try:
                    answer(self)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that goes away is what some tests are about."""

        if ":" in host:
            import socket

            Server.address_family = socket.AF_INET6
        self._server = Server((host, 0), Handler)
        self.port = self._server.server_address[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving(*answers: Answer, host: str = "127.0.0.1") -> Iterator[MetricsServer]:
    """The last answer is given again and again."""
    server = MetricsServer(answers, host)
    try:
        yield server
    finally:
        server.close()
