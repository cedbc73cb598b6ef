"""Mistakes on the command line, as tyro tells them in a box, made one line.

╭─ Value error ─────────────────────────────╮
│ Error parsing --epochs: no type matching  │      --epochs x: expected a whole number.
│ {None}|INT could be instantiated from     │ ──►  All options: fivefold train --help
│ ['x']. ...                                │
╰───────────────────────────────────────────╯
"""

from __future__ import annotations

import re

__all__ = ["one_line"]

_RULE = r"[─-]{3,}"
_KINDS = {"INT": "a whole number", "FLOAT": "a number"}


def one_line(box: str, name: str) -> str:
    """What a user did wrong on the command line of `name`, from the text that tyro printed."""
    # A title, then text, then a rule; the frame is of spaces where the terminal knows no box characters.
    _, *lines = [line.strip(" │╰╯") for line in box.splitlines()]
    text = " ".join("───" if re.fullmatch(_RULE, line) else line for line in lines)
    head = next((part.strip() for part in text.split("───") if part.strip()), "")
    told = _told(head, text)
    return f"{told}{'' if told.endswith('?') else '.'} All options: fivefold {name} --help"


def _told(head: str, text: str) -> str:
    if found := re.search(r"Error parsing (\S+): .*?matching (\S+) .*? from \['(.*?)'\]", head):
        option, kind, value = found.groups()
        expected = [words for word, words in _KINDS.items() if word in kind] or [kind]
        return f"{option.rpartition('/')[2]} {value}: expected {expected[0]}"
    if found := re.match(r"Unrecognized options: (.*)", head):
        near = re.search(r"meant:\s+(?:-\w+,\s+)*(-[\w.-]+)", text)
        word = found[1].split(",")[0].strip()
        kind = "unknown option" if word.startswith("-") else "unexpected argument"
        return f"{kind} {word}" + (f"; did you mean {near[1]}?" if near else "")
    if found := re.match(r"Missing value for argument '(.*?)'", head):
        return f"{found[1]} is missing"
    if found := re.match(r"Missing from fivefold [\w ]+:\s+(\S+)", head):
        return f"{found[1]} is missing"
    return head.rstrip(".") or "these options cannot be read"
