"""A model's config as fields that can be asked for by name; a missing one is never guessed."""

from collections.abc import Mapping, Sequence
from typing import Any

from omnicache_cli.errors import BadInputError

MOST_LAYERS = 10_000
MOST = 1 << 40
"""Counts above these are no model's; the lists that they would fill are not made."""


class NeedsClassDefaults(Exception):
    """The config.json is silent on a field that its config class may have a default for."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


class Fields:
    """One config object, such as the text config.

    Before its class has been asked (`complete` false) an absent field raises NeedsClassDefaults,
    unless `absent` says that absence means what the caller does with None.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: str,
        *,
        complete: bool,
        absent: frozenset[str] = frozenset(),
    ) -> None:
        self.values = values
        self.path = path  # "" or "text_config."
        self.complete = complete
        self.absent = absent

    def get(self, name: str) -> Any:
        """The value, or None where the config has none."""
        if name in self.values:
            value = self.values[name]
            if value is not None or self.complete or name in self.absent:
                return value
        if self.complete or name in self.absent:
            return None
        raise NeedsClassDefaults(self.path + name)

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def integer(self, *names: str) -> int:
        """The first of these fields that is set; refused when none is, or when it is no count."""
        for name in names:
            value = self.get(name)
            if value is not None:
                return self._as_count(name, value)
        raise BadInputError(
            f"the config lacks {self.path}{' or '.join(names)}, and nothing says what it would be; "
            "complete the config.json, or use --exact"
        )

    def optional_integer(self, *names: str) -> int | None:
        for name in names:
            value = self.get(name)
            if value is not None:
                return self._as_count(name, value)
        return None

    def mapping(self, name: str) -> "Fields":
        """A config inside this one."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise BadInputError(
                f"{self.path}{name} is {value!r}, not an object of fields; complete the config.json"
            )
        return Fields(value, f"{self.path}{name}.", complete=True)

    def integers(self, name: str) -> Sequence[int]:
        values = self.get(name)
        if not isinstance(values, list | tuple) or not all(_is_int(item) for item in values):
            raise BadInputError(f"{self.path}{name} is {values!r}, not a list of numbers")
        return values

    def words(self, name: str, known: Mapping[str, Any] | frozenset[str], count: int) -> list[str]:
        """A list with a word for each of `count` layers; a word that is not known is refused."""
        words = self.get(name)
        if not isinstance(words, list | tuple) or len(words) < count:
            raise BadInputError(
                f"{self.path}{name} does not name a type for each of the {count} layers"
            )
        for word in words[:count]:
            if word not in known:
                raise BadInputError(
                    f"{self.path}{name} has {word!r}, which the fast path does not understand "
                    f"(it knows {', '.join(sorted(known))}); use --exact"
                )
        return list(words[:count])

    def _as_count(self, name: str, value: Any) -> int:
        if not _is_int(value) or value < 0:
            raise BadInputError(f"{self.path}{name} is {value!r}, which is not a count; correct it")
        limit = MOST_LAYERS if "layer" in name else MOST
        if value > limit:
            raise BadInputError(
                f"{self.path}{name} is more than {limit:,}, which no model has; correct it"
            )
        return int(value)


def _is_int(value: Any) -> bool:
    return (isinstance(value, int) or (isinstance(value, float) and value.is_integer())) and (
        not isinstance(value, bool)
    )
