"""Fetches the pages of several servers at the same time, each with a deadline and a bound.

Knows HTTP and nothing of what is in a page. Credentials go to the servers that were named and
nowhere else: not to a redirect's target, and into no message.
"""

import asyncio
import contextlib
import os
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import SplitResult, urlsplit, urlunsplit

from omnicache_cli import __version__, advice
from omnicache_cli.errors import (
    BadInputError,
    EngineFailedError,
    EngineMissingError,
    OmnicacheError,
    UsageError,
)

if TYPE_CHECKING:
    import httpx

TOKEN_VARIABLE = "OMNICACHE_MONITOR_TOKEN"
MAX_BYTES = 32 << 20
"""Of one page; that of a server with eight engines has a quarter of a megabyte."""

MAX_REDIRECTS = 3
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """A server to read: the page's whole URL, and the name without credentials to show."""

    url: str
    name: str


@dataclass(frozen=True, slots=True)
class Scraped:
    """A page, and when it was made: `time` on the monotonic clock, halfway through the request."""

    text: str
    time: float


def target_of(text: str) -> Target:
    """From host:port, a base URL, or the URL of the page itself. UsageError: none of them."""
    whole = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(whole)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{without_credentials(text)!r} is no URL: {error}; {_LIKE}") from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or not whole.isprintable():
        raise UsageError(f"{without_credentials(text)!r} is no URL of a server; {_LIKE}")
    path = parts.path.rstrip("/")
    if not path.endswith("/metrics"):
        path += "/metrics"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    shown = f"{parts.scheme}://{host}{f':{port}' if port else ''}{path.removesuffix('/metrics')}"
    return Target(urlunsplit(parts._replace(path=path, fragment="")), shown)


_LIKE = "write it like http://localhost:8000"


def without_credentials(text: str) -> str:
    """What stands before an @ may be a password."""
    scheme, mark, rest = text.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def headers_of(given: Sequence[str]) -> dict[str, str]:
    """From `--header NAME: VALUE` and the environment. UsageError: not of that form."""
    headers = {}
    if token := os.environ.get(TOKEN_VARIABLE):
        headers["authorization"] = f"Bearer {token}"
    for one in given:
        name, mark, value = one.partition(":")
        if not mark or not name.strip().replace("-", "").replace("_", "").isalnum():
            raise UsageError("a --header is written 'NAME: VALUE'")  # it may hold a secret
        headers[name.strip().lower()] = value.strip()
    for name, value in headers.items():
        if not (name.isascii() and value.isascii() and value.isprintable()):
            raise UsageError(f"the header {name!r} has characters that no header may have")
    return headers


class Scraper:
    """Asks the same servers again and again. Use it as a context."""

    def __init__(self, targets: Sequence[Target], headers: dict[str, str], timeout: float) -> None:
        try:
            import httpx
            import prometheus_client.parser  # noqa: F401  needed with the first page
        except ImportError as error:
            raise EngineMissingError(
                f"{error.name} is not installed, so no server can be read; "
                f"{advice.install_extra('monitor')}"
            ) from None
        self._targets = targets
        self._timeout = timeout
        try:
            self._client = httpx.AsyncClient(
                headers={
                    "user-agent": f"omnicache/{__version__}",
                    "accept": "text/plain;version=0.0.4",
                    "accept-encoding": "identity",  # packing would cost the server's event loop
                    **headers,
                },
                timeout=timeout,
                verify=ssl.create_default_context(),
                # A connection that is kept may be closed by the server just when it is used.
                limits=httpx.Limits(max_keepalive_connections=0),
                follow_redirects=False,
            )
        except (ValueError, ImportError, httpx.InvalidURL) as error:
            raise UsageError(
                "a proxy of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY) cannot be used: "
                f"{without_credentials(_first_line(error))}; mend or unset it"
            ) from None
        # A loop in a thread of its own: Ctrl-C then ends the wait for it, and nothing inside it.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(2.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def scrape(self) -> list[Scraped | OmnicacheError]:
        """One page of each server, in their order, or why there is none."""
        pages = asyncio.run_coroutine_threadsafe(self._scrape_all(), self._loop)
        try:
            return pages.result()
        except BaseException:
            pages.cancel()
            raise

    async def _end(self) -> None:
        """What an interrupt has left under way is over before the loop is."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.aclose()

    async def _scrape_all(self) -> list[Scraped | OmnicacheError]:
        return list(await asyncio.gather(*map(self._scrape_one, self._targets)))

    async def _scrape_one(self, target: Target) -> Scraped | OmnicacheError:
        import httpx

        try:
            async with asyncio.timeout(self._timeout):
                return await self._fetch(target)
        except OmnicacheError as error:
            return error
        except (TimeoutError, httpx.TimeoutException):
            return EngineFailedError(
                f"{target.name} has not sent its metrics within {self._timeout:g} s; is it "
                "overloaded, or behind a proxy? --timeout S waits longer"
            )
        except httpx.HTTPError as error:
            return EngineFailedError(_why_away(target, error))
        except (httpx.InvalidURL, UnicodeError) as error:
            return UsageError(f"{target.name} is no URL: {_first_line(error)}; {_LIKE}")

    async def _fetch(self, target: Target) -> Scraped:
        url = target.url
        for _ in range(MAX_REDIRECTS + 1):
            begun = time.monotonic()
            async with self._client.stream("GET", url) as response:
                if response.has_redirect_location:
                    url = _redirected(target, url, response)
                    continue
                _check_status(target, response)
                content = bytearray()
                async for chunk in response.aiter_raw(1 << 16):
                    content += chunk
                    if len(content) > MAX_BYTES:
                        raise BadInputError(
                            f"{target.name} sends over {MAX_BYTES >> 20} MiB, which is no page of "
                            "metrics; name a vLLM server"
                        )
                middle = (begun + time.monotonic()) / 2
                return Scraped(content.decode("utf-8", errors="replace"), middle)
        raise BadInputError(f"{target.name} redirects without end; name the URL of the server")


def _redirected(target: Target, url: str, response: "httpx.Response") -> str:
    """Where to go on, on the same server; BadInputError: to another one."""
    from urllib.parse import urljoin

    to = urljoin(url, response.headers["location"])
    if _origin(urlsplit(to)) != _origin(urlsplit(url)):
        raise BadInputError(
            f"{target.name} redirects to {without_credentials(to)[:200]} ({response.status_code}); "
            "if that is the server, name it"
        )
    own = urlsplit(url)
    return urlunsplit(urlsplit(to)._replace(netloc=own.netloc))  # with its credentials


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme)


def _check_status(target: Target, response: "httpx.Response") -> None:
    status = response.status_code
    if status in (401, 403):
        raise BadInputError(
            f"{target.name} refuses to show its metrics ({status}); set {TOKEN_VARIABLE}, or give "
            "a --header"
        )
    if status >= 500:
        raise EngineFailedError(
            f"{target.name} answers with {status} instead of its metrics; look into its log"
        )
    if response.headers.get("content-encoding", "identity") != "identity":
        raise BadInputError(
            f"{target.name} packs its page, though it was asked not to; name the server itself and "
            "no proxy before it"
        )
    if status != 200:
        raise BadInputError(
            f"{target.name} has no page /metrics ({status}); name a vLLM server, http://host:port"
        )


def _why_away(target: Target, error: "httpx.HTTPError") -> str:
    text = _reason(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            f"{target.name} has a certificate that is not trusted here; "
            "SSL_CERT_FILE=FILE names one that is"
        )
    what = {
        "ConnectError": "cannot be reached",
        "RemoteProtocolError": "broke off, or does not speak HTTP",
        "ReadError": "broke off",
        "ProxyError": "cannot be reached through the proxy of the environment",
    }.get(type(error).__name__, "cannot be read")
    detail = without_credentials(text)
    return (
        f"{target.name} {what}{f': {detail}' if detail else ''}; is the server up, and is this "
        "its port?"
    )


def _reason(error: BaseException) -> str:
    """What the system said, where it lies below: "Connection refused", not that attempts failed."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BaseExceptionGroup):
            seen = seen.exceptions[-1]
        elif isinstance(seen, OSError) and seen.strerror and not isinstance(seen, ssl.SSLError):
            return os.strerror(seen.errno) if seen.errno and seen.errno > 0 else seen.strerror
        elif isinstance(seen, ssl.SSLCertVerificationError):
            return "CERTIFICATE_VERIFY_FAILED"
        else:
            seen = seen.__cause__ or seen.__context__
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else ""
