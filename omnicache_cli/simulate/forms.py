"""The forms a workload may be written in, one JSON object a line, and how they are told apart."""

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol, get_args
from zlib import crc32

import msgspec

from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.prefix.prompts import AskedPrompt, read_line
from omnicache_cli.simulate.request import KnownHashes, SimRequest, chained

Form = Literal["prompts", "openai", "hashes"]
FORMS: tuple[Form, ...] = get_args(Form)

TimeUnit = Literal["s", "ms", "us", "ns"]
SECONDS: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

PUBLISHED_SIZES = (512, 16)
"""Tokens under one hash id: Mooncake's traces, and Alibaba's."""


class Tokenizer(Protocol):
    """A model's; the engine room has one, `Pieces` needs no model."""

    def text(self, text: str) -> list[int]:
        """Token ids of a text as a prompt."""

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, the start of the answer included."""

    def answer(self, text: str) -> list[int]:
        """Token ids of an answer, which begins no prompt."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Words and signs as tokens: no model's, but equal texts are equal."""

    def text(self, text: str) -> list[int]:
        return [crc32(piece.encode("utf-8", "backslashreplace")) for piece in _PIECE.findall(text)]

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        turns = "".join(f"<{one['role']}>\n{one['content']}\n" for one in messages)
        return self.text(f"{turns}<assistant>\n")

    def answer(self, text: str) -> list[int]:
        return self.text(text)


_PIECE = re.compile(r" ?\w{1,6}|\s+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Reading:
    """How lines are to be read. None: by what they are, or the form's default."""

    form: Form | None = None
    tokenizer: Tokenizer | None = None
    max_tokens: int = 1  # of a request that does not say it
    time_unit: TimeUnit | None = None
    hash_tokens: int | None = None  # tokens under one hash id


class Lines:
    """The requests of a workload in JSON lines. `form` is known from the first line on."""

    def __init__(self, lines: Iterator[bytes], name: str, reading: Reading) -> None:
        self.form: Form | None = reading.form
        self.unhashed_tokens = 0  # of prompts with too few hash ids
        self._lines = lines
        self._name = name
        self._reading = reading
        self._hash_tokens = reading.hash_tokens

    def __iter__(self) -> Iterator[SimRequest]:
        """BadInputError: a line is not of the form; it names file and line, never the content."""
        read: Callable[[bytes, str, str], SimRequest] | None = None
        index = 0
        for number, line in enumerate(self._lines, start=1):
            text = line.removeprefix(BOM_UTF8) if number == 1 else line
            if not text.strip():
                continue
            where = f"{self._name}:{number}"
            if read is None:
                self.form = self.form or form_of(text, where)
                read = {"prompts": self._prompt, "openai": self._log, "hashes": self._hashed}[
                    self.form
                ]
            yield read(text, where, f"p{index}")
            index += 1

    def notes(self) -> list[str]:
        """What is to be said once all is read."""
        if not self.unhashed_tokens:
            return []
        return [
            f"{self.unhashed_tokens:,} prompt tokens have no hash id; they are taken to hit never"
        ]

    # -- prompts ------------------------------------------------------------------------------

    def _prompt(self, line: bytes, where: str, name: str) -> SimRequest:
        asked: AskedPrompt = read_line(line, where, name, max_tokens=self._reading.max_tokens)
        ids = asked.token_ids
        if ids is None:
            ids = self._some_tokenizer(where).text(asked.text or "")
        return SimRequest(
            asked.name,
            len(ids),
            asked.max_tokens,
            ids,
            media=asked.media,
            cache_salt=asked.cache_salt,
            adapter=asked.adapter,
            skip_reading_prefix_cache=asked.skip_reading_prefix_cache,
            arrival_step=asked.arrival_step,
            abort_step=asked.abort_step,
        )

    # -- request logs -------------------------------------------------------------------------

    def _log(self, line: bytes, where: str, name: str) -> SimRequest:
        entry = _decoded(line, LogLine, where, "an OpenAI-style request")
        body = entry.body or entry.request or entry
        tokenizer = self._some_tokenizer(where) if _needs_tokens(body) else None
        if body.messages is not None:
            assert tokenizer is not None
            ids = tokenizer.chat([_turn(one, where) for one in body.messages])
        elif isinstance(body.prompt, str):
            assert tokenizer is not None
            ids = tokenizer.text(body.prompt)
        elif body.prompt:
            ids = list(body.prompt)
        else:
            raise BadInputError(f"{where}: neither messages nor a prompt; see docs/simulate.md")
        if not ids:
            raise BadInputError(f"{where}: the prompt is empty; vLLM needs at least one token")
        response = entry.response or Response()
        response = response.body or response
        answer = _answer(response, tokenizer)
        asked = body.max_completion_tokens or body.max_tokens
        told = None if response.usage is None else response.usage.completion_tokens
        return SimRequest(
            entry.custom_id or entry.id or name,
            len(ids),
            max(1, told or len(answer) or asked or self._reading.max_tokens),
            ids,
            output_token_ids=answer,
            cache_salt=body.cache_salt,
            arrival_seconds=self._seconds(_number(entry.timestamp, where) or entry.created, "s"),
        )

    # -- hash ids -----------------------------------------------------------------------------

    def _hashed(self, line: bytes, where: str, name: str) -> SimRequest:
        entry = _decoded(line, HashLine, where, "a request by hash ids")
        tokens, ids = entry.input_length, entry.hash_ids
        if tokens < 1:
            raise BadInputError(f"{where}: input_length is {tokens}; the least is 1")
        size = entry.block_size or self._hash_tokens
        if size is None:
            size = self._hash_tokens = _size_of(tokens, len(ids), where)
        if size < 1:
            raise BadInputError(f"{where}: block_size is {size}; the least is 1")
        needed = -(-tokens // size)
        if len(ids) > needed:
            raise BadInputError(
                f"{where}: {len(ids)} hash ids for {tokens} tokens, and ids of {size} tokens make "
                f"{needed}; give --hash-tokens"
            )
        self.unhashed_tokens += max(0, tokens - len(ids) * size)
        default: TimeUnit = "ms" if size == PUBLISHED_SIZES[0] else "s"
        return SimRequest(
            name,
            tokens,
            max(1, entry.output_length or self._reading.max_tokens),
            known=KnownHashes(size, chained(ids), divisible=True),
            arrival_seconds=self._seconds(entry.timestamp, default),
        )

    # -- common -------------------------------------------------------------------------------

    def _seconds(self, time: float | None, default: TimeUnit) -> float | None:
        return None if time is None else time * SECONDS[self._reading.time_unit or default]

    def _some_tokenizer(self, where: str) -> Tokenizer:
        if self._reading.tokenizer is None:
            raise UsageError(
                f"{where}: the prompt is text; name a model folder with --tokenizer, or count "
                "words with --tokenizer pieces"
            )
        return self._reading.tokenizer


class Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None


class Message(msgspec.Struct, frozen=True):
    content: Any = None


class Choice(msgspec.Struct, frozen=True):
    message: Message | None = None
    text: str | None = None


class Response(msgspec.Struct, frozen=True):
    """OpenAI's response; in batch files its body stands one level deeper."""

    usage: Usage | None = None
    choices: list[Choice] = []
    body: "Response | None" = None


class Body(msgspec.Struct, frozen=True):
    """OpenAI's request."""

    messages: list[Any] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    cache_salt: str | None = None


class LogLine(Body, frozen=True):
    """A request by itself, or under `body` (batch files) or `request`, with its response beside."""

    body: Body | None = None
    request: Body | None = None
    response: Response | None = None
    custom_id: str | None = None
    id: str | None = None
    timestamp: float | str | None = None  # a number, or as in ISO 8601
    created: float | None = None


class HashLine(msgspec.Struct, frozen=True):
    """A request of a public trace: only which blocks are equal."""

    input_length: int
    hash_ids: list[int | str]
    output_length: int | None = None
    timestamp: float | None = None
    block_size: int | None = None  # tokens under one id


class _Keys(msgspec.Struct, frozen=True):
    hash_ids: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()
    request: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()


def form_of(line: bytes, where: str) -> Form:
    """By the fields of a first line."""
    keys = _decoded(line, _Keys, where, "a request")
    if bytes(keys.hash_ids):
        return "hashes"
    logged = (keys.messages, keys.body, keys.request, keys.model)
    return "openai" if any(map(bytes, logged)) else "prompts"


def _decoded(line: bytes, kind: Any, where: str, what: str) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInputError(
            f"{where}: not {what} ({error}); see docs/simulate.md for the forms"
        ) from error


def _size_of(tokens: int, num_ids: int, where: str) -> int:
    """Tokens under one hash id, of those that public traces have."""
    for size in PUBLISHED_SIZES:
        if -(-tokens // size) == num_ids:
            return size
    raise BadInputError(
        f"{where}: {num_ids} hash ids for {tokens} tokens are blocks of neither "
        f"{PUBLISHED_SIZES[0]} nor {PUBLISHED_SIZES[1]} tokens; give --hash-tokens"
    )


def _number(time: float | str | None, where: str) -> float | None:
    if not isinstance(time, str):
        return time
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError as error:
        raise BadInputError(
            f"{where}: the timestamp is neither a number nor as in ISO 8601"
        ) from error


def _needs_tokens(body: Body) -> bool:
    return body.messages is not None or isinstance(body.prompt, str)


def _answer(response: Response, tokenizer: Tokenizer | None) -> list[int]:
    """Tokens of the answer, where the log has it: the next turn of a conversation may hit them."""
    if tokenizer is None or not response.choices:
        return []
    first = response.choices[0]
    text = first.text if first.message is None else first.message.content
    return tokenizer.answer(text) if isinstance(text, str) and text else []


def _turn(message: Any, where: str) -> dict[str, Any]:
    """One message with its content as text; what is not text stands by its digest."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadInputError(f"{where}: a message has no role; see docs/simulate.md for the forms")
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, list):
        content = "".join(map(_part, content))
    elif not isinstance(content, str):
        raise BadInputError(f"{where}: the content of a message is neither text nor a list")
    if message.get("tool_calls"):
        content += _part(message["tool_calls"])
    return {"role": message["role"], "content": content}


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return f"<{crc32(msgspec.json.encode(part)):08x}>"
