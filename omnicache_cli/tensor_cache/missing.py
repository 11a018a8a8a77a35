"""The error for rows that a prefix hit counts on and that are not there."""

from typing import Literal

from omnicache_cli.errors import OmnicacheError

Reason = Literal["never-written", "evicted", "in-flight"]

_BECAUSE: dict[str, str] = {
    "never-written": "it was never written",
    "evicted": "its block was given to somebody else since it was written",
    "in-flight": "it is scheduled in this step and not saved yet",
}


class RowsMissingError(OmnicacheError):
    """A request's rows cannot be restored. The fields describe the first row that is missing."""

    def __init__(
        self,
        *,
        key: str,
        request_id: str,
        position: int,
        slot: int,
        block: int,
        reason: Reason,
        hit_tokens: int,
        num_missing: int,
        num_wanted: int,
    ) -> None:
        self.key = key
        self.request_id = request_id
        self.position = position
        self.slot = slot
        self.block = block
        self.reason = reason
        self.hit_tokens = hit_tokens  # 0: rows of this step are missing
        self.num_missing = num_missing  # rows
        self.num_wanted = num_wanted  # rows: the restored prefix and this step's
        super().__init__(str(self))

    def __str__(self) -> str:
        return (
            f"{self.what}; request {self.request_id}, position {self.position}: slot {self.slot} "
            f"of block {self.block} has no row, {_BECAUSE[self.reason]}; "
            "compute this prompt again without a prefix hit"
        )

    @property
    def what(self) -> str:
        """How many rows there are, and how many there should be."""
        rows = f"{self.num_wanted - self.num_missing} rows instead of {self.num_wanted}"
        if self.reason == "in-flight":
            return f"{self.num_missing} of {self.num_wanted} rows of key {self.key} have not come"
        if self.num_missing >= self.hit_tokens:
            return f"key {self.key} has no cached rows: {rows}"
        return f"key {self.key} lacks cached rows: {rows}"
