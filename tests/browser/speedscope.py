"""The speedscope viewer, fetched from npm beside the browser: a web page that needs no server."""

import io
import shutil
import sys
import tarfile
from pathlib import Path

from tests.browser.browser import checked, download

PACKAGE = "speedscope@1.25.0"
SHA512 = "cpf9HWTZf1ijLXBJrk87Ve/54tnYx6rlf0gUThvn3ook6h63hLXVOQiMf44PT+XoV503cPfvfiT5gP5vojp6Ag=="
"""Base64, of the package's file."""

FETCHED = Path(sys.prefix) / "speedscope"
PAGE = FETCHED / "viewer" / "index.html"
IN_PACKAGE = "package/dist/release/"


def find_or_fetch() -> Path:
    """Its page. NoBrowserError: it cannot be had."""
    if PAGE.exists():
        return PAGE
    shutil.rmtree(FETCHED, ignore_errors=True)
    working = FETCHED / "working"
    working.mkdir(parents=True)
    content = checked(download(FETCHED, PACKAGE), PACKAGE, SHA512)
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        for member in package.getmembers():
            name = member.name.removeprefix(IN_PACKAGE)
            file = package.extractfile(member)
            if file is not None and name != member.name and "/" not in name:
                (working / name).write_bytes(file.read())
    working.rename(PAGE.parent)  # last: it is there only when all is
    return PAGE
