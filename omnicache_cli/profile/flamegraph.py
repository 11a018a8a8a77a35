"""A recording as a flame graph: one SVG without scripts. The outermost frame is at the top; a wider
box has more of the samples in it; a box's tooltip has its whole name and its share.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from omnicache_cli.profile.hottest import short_file
from omnicache_cli.profile.recording import StackRecording
from omnicache_cli.report.layout import escaped

WIDTH = 1200
ROW = 17
MARGIN = 10
HEAD = 48
NARROWEST = 0.4
"""Pixels; a narrower box would not be seen, and is left out with what it calls."""

CHARACTER = 6.6
"""Pixels of one character at the size of the text."""

STYLE = (
    "text{font:11px ui-monospace,Menlo,Consolas,monospace;fill:#1a1a1a;pointer-events:none}"
    ".t{font-size:15px}rect{stroke:#fff;stroke-width:.5}g:hover>rect{stroke:#000}"
)


@dataclass(slots=True)
class _Node:
    name: str
    weight: int = 0
    children: dict[str, "_Node"] = field(default_factory=dict)

    def child(self, name: str) -> "_Node":
        return self.children.setdefault(name, _Node(name))


def as_flamegraph(recording: StackRecording, title: str) -> str:
    """The SVG; ASCII only."""
    root = _tree(recording)
    boxes = list(_boxes(root))
    height = HEAD + ROW * (1 + max(depth for _, depth, _, _ in boxes)) + MARGIN
    drawn = "\n".join(_drawn(node, depth, x, width, root.weight) for node, depth, x, width in boxes)
    unit = "samples" if recording.unit == "samples" else "ms of the threads' time"
    all_of_it = root.weight if recording.unit == "samples" else root.weight // 1000
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">\n'
        f"<title>{_safe(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#fbfaf7"/>\n'
        f'<text class="t" x="{MARGIN}" y="22">{_safe(title)}</text>\n'
        f'<text x="{MARGIN}" y="39">{all_of_it} {unit}</text>\n{drawn}\n</svg>\n'
    )
    return picture.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _tree(recording: StackRecording) -> _Node:
    root = _Node("all")
    names = [f"{frame.name} ({short_file(frame.file)})" for frame in recording.frames]
    for thread in recording.threads:
        for stack, weight in thread.stacks:
            if not stack:
                continue
            node = root.child(thread.name)
            root.weight += weight
            node.weight += weight
            for frame in stack:
                node = node.child(names[frame])
                node.weight += weight
    return root


def _boxes(root: _Node) -> Iterator[tuple[_Node, int, float, float]]:
    """Each node that can be seen: its depth, its left edge and its width in pixels."""
    pixels = (WIDTH - 2 * MARGIN) / max(1, root.weight)
    waiting: list[tuple[_Node, int, float]] = [(root, 0, float(MARGIN))]
    while waiting:
        node, depth, x = waiting.pop()
        yield node, depth, x, node.weight * pixels
        for child in sorted(node.children.values(), key=lambda one: one.name):
            if child.weight * pixels >= NARROWEST:
                waiting.append((child, depth + 1, x))
            x += child.weight * pixels


def _drawn(node: _Node, depth: int, x: float, width: float, total: int) -> str:
    y = HEAD + ROW * depth
    share = 100 * node.weight / max(1, total)
    room = int((width - 4) / CHARACTER)
    label = ""
    if room >= 3:
        name = escaped(node.name)
        shown = name if len(name) <= room else f"{name[: room - 2]}.."
        label = f'<text x="{x + 3:.1f}" y="{y + 12}">{escape(shown)}</text>'
    return (
        f"<g><title>{_safe(node.name)}, {share:.2f} %</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 1}" '
        f'fill="{_colour(node.name)}"/>{label}</g>'
    )


def _colour(name: str) -> str:
    """Warm, and the same for the same function in every picture."""
    seed = zlib.crc32(name.encode("utf-8", "replace"))
    return f"hsl({seed % 50},{62 + (seed >> 8) % 20}%,{66 + (seed >> 16) % 12}%)"


def _safe(text: str) -> str:
    return escape(escaped(text))
