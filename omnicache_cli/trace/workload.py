"""What to send to an engine: prompts from the command line, a JSON-lines file or stdin.

Owns the prompts file. Does not know vLLM: images and audio stay paths here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec

from omnicache_cli.errors import BadInputError


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter. Two adapters may share a name: the path tells them apart."""

    path: str
    name: str | None = None  # default: the folder's name

    @property
    def label(self) -> str:
        return self.name or PurePath(self.path).name


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a prompts file."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    images: list[str] = []
    audio: list[str] = []
    cache_salt: str | None = None
    lora: str | Lora | None = None
    max_tokens: int | None = None
    arrival_step: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to send. Exactly one of text and token_ids is set."""

    text: str | None
    token_ids: list[int] | None
    images: tuple[Path, ...] = ()
    audio: tuple[Path, ...] = ()
    cache_salt: str | None = None
    lora: Lora | None = None
    max_tokens: int | None = None  # None: the command's option
    arrival_step: int | None = None  # earliest engine step of its round; None: by concurrency


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and how to send them. Rounds follow one another, each waits for the one before."""

    prompts: tuple[Prompt, ...]
    num_rounds: int = 1
    concurrency: int = 1  # requests at a time; without meaning where prompts have an arrival_step
    max_tokens: int = 16
    ignore_eos: bool = False

    @property
    def num_requests(self) -> int:
        """Requests of all rounds."""
        return len(self.prompts) * self.num_rounds

    @property
    def has_arrivals(self) -> bool:
        """Some prompt says in which step it arrives."""
        return any(prompt.arrival_step is not None for prompt in self.prompts)


def read_prompts(lines: Iterable[bytes], *, name: str, folder: Path) -> Iterator[Prompt]:
    """Prompts of a JSON-lines file; blank lines are skipped, paths are relative to `folder`.

    BadInputError names file and line, never the prompt itself.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            parsed = msgspec.json.decode(line, type=PromptLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadInputError(
                f"{where}: not a prompt ({error}); one JSON object per line with prompt or "
                "prompt_token_ids, see `omnicache trace --help`"
            ) from error
        yield _prompt(parsed, where, folder)


def _prompt(line: PromptLine, where: str, folder: Path) -> Prompt:
    if (line.prompt is None) == (line.prompt_token_ids is None):
        raise BadInputError(f"{where}: give exactly one of prompt and prompt_token_ids")
    if not (line.prompt if line.prompt is not None else line.prompt_token_ids):
        raise BadInputError(f"{where}: the prompt is empty; vLLM needs at least one token")
    if line.prompt_token_ids is not None and min(line.prompt_token_ids) < 0:
        raise BadInputError(
            f"{where}: token id {min(line.prompt_token_ids)} is negative; ids start at 0"
        )
    if line.max_tokens is not None and line.max_tokens < 1:
        raise BadInputError(f"{where}: max_tokens is {line.max_tokens}; the least is 1")
    if line.arrival_step is not None and line.arrival_step < 0:
        raise BadInputError(f"{where}: arrival_step is {line.arrival_step}; steps start at 0")
    lora = Lora(line.lora) if isinstance(line.lora, str) else line.lora
    if lora is not None:
        lora = Lora(_adapter(folder, lora.path, where), lora.name or Path(lora.path).name)
    return Prompt(
        line.prompt,
        line.prompt_token_ids,
        tuple(_existing(folder / one, "image", where) for one in line.images),
        tuple(_existing(folder / one, "audio", where) for one in line.audio),
        line.cache_salt,
        lora,
        line.max_tokens,
        line.arrival_step,
    )


def _adapter(folder: Path, path: str, where: str) -> str:
    """A folder, or a hub id as it stands."""
    if (folder / path).is_dir():
        return str(folder / path)
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        return path
    raise BadInputError(
        f"{where}: no LoRA folder {folder / path}; paths are relative to the prompts file"
    )


def _existing(path: Path, what: str, where: str) -> Path:
    try:
        is_file = path.is_file()
    except OSError as error:
        raise BadInputError(f"{where}: cannot read the {what} file: {error.strerror}") from error
    if not is_file:
        raise BadInputError(
            f"{where}: no {what} file {path}; paths are relative to the prompts file"
        )
    return path
