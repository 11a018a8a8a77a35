"""How many terminal columns a text takes, where it may be broken, and what must not be printed raw.

Owns nothing but characters: no tables, no reports.
"""

import shlex
import unicodedata

# A line is best broken after one of these.
BREAK_AFTER = " ,;/_-"


def escaped(text: str) -> str:
    """The text with everything a terminal might act on written as an escape, such as \\x1b.

    Prompts, file names and model names come from strangers. Line breaks and lone surrogates
    (undecodable bytes in a file name) are escaped too, so the result is one printable line.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def quoted(text: str) -> str:
    """The text as one word of a shell's command line, such that it is printable.

    What is not printable stands in $'…' as the bytes of a file name, which bash, zsh and ksh take.
    """
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_in_dollar_quotes, text)) + "'"


def _in_dollar_quotes(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", errors="surrogateescape"))


def char_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def display_width(text: str) -> int:
    """Terminal columns: wide East Asian characters take two, combining marks none."""
    return len(text) if text.isascii() else sum(map(char_width, text))


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` columns; long words are cut. At least one line."""
    if len(text) <= width and text.isascii():
        return [text]
    lines: list[str] = []
    start = 0
    while start < len(text) or not lines:
        end = _end_of_line(text, start, width)
        lines.append(text[start:end].rstrip(" ") if end < len(text) else text[start:])
        start = end
        while text[start : start + 1] == " ":
            start += 1
    return lines


def longest_piece(text: str) -> int:
    """Columns of the longest part that `wrapped` does not have to cut."""
    pieces = "".join(f"{char}\n" if char in BREAK_AFTER else char for char in text).split("\n")
    return max(map(display_width, pieces))


def _end_of_line(text: str, start: int, width: int) -> int:
    """Where the line that begins at `start` ends: after a break character if there is one."""
    end, used = start, 0
    while end < len(text) and used + char_width(text[end]) <= width:
        used += char_width(text[end])
        end += 1
    if end == len(text) or text[end] == " ":
        return end
    end = max(end, start + 1)  # a wide character in a column of one: too wide, but it ends
    for cut in range(end, start, -1):
        if text[cut - 1] in BREAK_AFTER and text[start:cut].strip():
            return cut
    return end
