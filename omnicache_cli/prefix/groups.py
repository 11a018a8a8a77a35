"""Each KV cache group's own answer to a lookup, and what it kept of a prefix."""

from omnicache_cli.prefix.ledger import Ledger
from omnicache_cli.prefix.lookup import Layout, SpecGroup, blocks_in_window, entry_of
from omnicache_cli.trace.steps import Request
from omnicache_cli.trace.views.words import runs_text

MAX_RUNS = 6
"""Runs of kept positions that a line lists."""


def group_evidence(
    ledger: Ledger, layout: Layout, request: Request, answers: list[int], needed: int
) -> list[str]:
    """A line per spec: its own answer, what a hit of `needed` tokens wants, and what is kept."""
    lines = []
    for group in layout.groups:
        numbers = ", ".join(map(str, group.numbers))
        word = "group" if len(group.numbers) == 1 else "groups"
        line = f"{word} {numbers} ({described(group)}): {answers[group.numbers[0]]}"
        if group.kind != "full":
            line += f"; {_wanted(group, needed)}; {_kept(ledger, layout, group, request)}"
        lines.append(line)
    return lines


def described(group: SpecGroup) -> str:
    window = "" if group.window is None else f", window {group.window}"
    return f"{group.spec}, blocks of {group.block_size}{window}"


def _wanted(group: SpecGroup, needed: int) -> str:
    if group.kind == "state":
        return f"a hit there needs the state at token {needed}"
    blocks = blocks_in_window(group, group.drops_block)
    return (
        f"a hit there needs {blocks} {'block' if blocks == 1 else 'blocks'} before token {needed}"
    )


def _kept(ledger: Ledger, layout: Layout, group: SpecGroup, request: Request) -> str:
    """Of the requests that share this prefix, what the group has in the cache."""
    mine = _positions(ledger, layout, group, request)
    kept = f"kept of this prefix: {_listed(group, mine)}"
    donor = _donor(ledger, request)
    if donor is not None and donor is not request:
        theirs = _positions(ledger, layout, group, donor)
        kept += f"; of #{donor.number} {donor.external_id}: {_listed(group, theirs)}"
    return kept


def _listed(group: SpecGroup, positions: list[int]) -> str:
    if not positions:
        return "nothing"
    if group.kind == "state":
        shown = ", ".join(map(str, positions[:MAX_RUNS]))
        more = "" if len(positions) <= MAX_RUNS else f" and {len(positions) - MAX_RUNS} more"
        return f"states at {shown}{more}"
    blocks = [position // group.block_size - 1 for position in positions]
    return f"blocks {runs_text(blocks, most=MAX_RUNS)}"


def _positions(ledger: Ledger, layout: Layout, group: SpecGroup, request: Request) -> list[int]:
    """Tokens at which blocks of the group end that are in the cache."""
    found = []
    hashes = request.block_hashes
    fine = group.kind == "state" and layout.unit < group.block_size
    size = layout.unit if fine else group.block_size
    for index in range(len(hashes) * layout.hash_block_size // size):
        entry = index if fine else entry_of(layout, group, index)
        if entry < len(hashes) and all(
            ledger.has((number, hashes[entry])) for number in group.numbers
        ):
            found.append((index + 1) * size)
    return found


def _donor(ledger: Ledger, request: Request) -> Request | None:
    """The latest other request that shares most blocks."""
    best = None
    for one in request.block_hashes:
        sharer = next((other for other in ledger.sharers(one) if other is not request), None)
        if sharer is None:
            break
        best = sharer
    return best
