"""`omnicache export` in this process, and what a timeline holds."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnicache_cli.export.perfetto import write_timeline
from omnicache_cli.export.samples import Samples
from omnicache_cli.export.timeline import Timeline
from omnicache_cli.profile.manifest import read_profile_manifest
from omnicache_cli.trace.run import Run
from tests.unit.showing import Ran

Export = Callable[..., Ran]


def timeline_bytes(folder: Path) -> bytes:
    """The file that a run is exported to."""
    manifest = read_profile_manifest(folder)
    samples = None if manifest is None else Samples(folder, manifest)
    stream = io.BytesIO()
    write_timeline(Timeline(Run(folder), samples), stream)
    return stream.getvalue()


def events_of(folder: Path) -> Any:
    """What is in it."""
    return json.loads(timeline_bytes(folder))
