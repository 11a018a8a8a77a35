"""Rows against rows: bit for bit, and by how much they differ.

The error of a row is relative: the Euclidean norm of the difference over that of the expected
row. Hidden states have a few dimensions, and a few tokens, that are a thousand times larger than
the rest; an absolute bound would be theirs alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SHOWN_VALUES = 4
"""Values of the first differing row that are kept, from its first differing column on."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How the rows of one key differ from those expected."""

    num_rows: int
    num_bytes: int
    num_differing_rows: int  # by at least one bit
    max_abs_error: float
    max_relative_error: float  # of a row; infinite where nothing was expected but zeros
    first_position: int | None  # of the first row over the bound asked for; None: there is none
    first_column: int | None = None
    expected_values: tuple[float, ...] = ()
    found_values: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()  # relative, of each row


@dataclass(frozen=True, slots=True)
class Bound:
    """How far a row may be off. Without `atol` and `rtol` its relative error counts."""

    relative: float = 0.0
    atol: float | None = None
    rtol: float | None = None

    def broken_by(self, expected: Tensor, gap: Tensor, relative: Tensor) -> Tensor:
        """Per row. All are of the rows that differ; gap is |found - expected|."""
        if self.atol is None or self.rtol is None:
            return relative > self.relative
        return (gap > self.atol + self.rtol * expected.abs()).any(dim=1)


EXACT = Bound()


def compare_rows(
    expected: Tensor, found: Tensor, positions: Sequence[int], bound: Bound = EXACT
) -> Difference:
    """Both are (num_rows, width) of one dtype; row i belongs to token position positions[i].

    Without a bound a single bit counts. NaN equals only the same NaN. ValueError: shapes or dtypes
    differ.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise ValueError(
            f"rows of {tuple(found.shape)} {found.dtype} against {tuple(expected.shape)} "
            f"{expected.dtype}"
        )
    num_bytes = found.numel() * found.element_size()
    if not len(found):
        return Difference(0, 0, 0, 0.0, 0.0, None)
    differs = (_bits(expected) != _bits(found)).any(dim=1)
    num_differing = int(differs.sum())
    if not num_differing:
        return Difference(len(found), num_bytes, 0, 0.0, 0.0, None, errors=(0.0,) * len(found))
    rows = differs.nonzero().flatten()
    wanted, got = expected[rows].double(), found[rows].double()
    gap = (wanted - got).abs()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    relative = _relative(gap, wanted)
    over = (
        torch.ones(len(rows), dtype=torch.bool)
        if bound == EXACT
        else bound.broken_by(wanted, gap, relative)
    )
    first = int(over.nonzero()[0, 0]) if bool(over.any()) else None
    errors = torch.zeros(len(found), dtype=torch.double)
    errors[rows] = relative
    difference = Difference(
        len(found),
        num_bytes,
        num_differing,
        float(gap.max()),
        float(relative.max()),
        None,
        errors=tuple(errors.tolist()),
    )
    if first is None:
        return difference
    row = int(rows[first])
    column = int((_bits(expected[row]) != _bits(found[row])).nonzero()[0, 0])
    shown = slice(column, column + SHOWN_VALUES)
    return replace(
        difference,
        first_position=positions[row],
        first_column=column,
        expected_values=tuple(expected[row, shown].double().tolist()),
        found_values=tuple(found[row, shown].double().tolist()),
    )


def _relative(gap: Tensor, expected: Tensor) -> Tensor:
    size = expected.norm(dim=1)
    error = gap.norm(dim=1)
    return torch.where(size > 0, error / size, torch.where(error > 0, torch.inf, 0.0))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(rows: Tensor) -> Tensor:
    """The same memory as integers: NaN compares, and -0 is not 0."""
    return rows.contiguous().view(_INTEGERS[rows.element_size()])
