"""What a pasted script would call: its assignments and branches are followed, nothing is run. A
condition that only the machine of the run knows leads to several outcomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from copus_ext.planner.shell_pattern import matches
from copus_ext.planner.shell_text import Value, Words, tokens, variables

Status = bool | str | None
"""Of a command: true, false, None for a condition that is not known, or `_RAN`."""
_RAN = "ran"
"""A program, which mostly ends well; as a condition it says what is not known."""
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_SHELLS = ("bash", "sh", "zsh", "dash")
SOURCES = ("source", ".")
"""Take the lines of another file. One that is not here stays a command."""
_MOST = 64
"""Outcomes that are followed together."""
_OPENS = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done"}
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}
_SIGNS = {"==": "-eq", "!=": "-ne", "<=": "-le", ">=": "-ge", "<": "-lt", ">": "-gt"}

Tokens = list[tuple[str, str]]


@dataclass
class Outcome:
    """A way through a script."""

    values: dict[str, Value]
    commands: list[list[str]] = field(default_factory=list)
    """The programs that it calls, word by word."""
    unknown: tuple[tuple[str, int], ...] = ()
    """The conditions that were not known on the way, and the turns taken."""
    functions: dict[str, Tokens] = field(default_factory=dict)
    ended: str = ""
    """`exit` or `return` behind one."""

    def copy(self, condition: str, turn: int) -> Outcome:
        """Another way, by a turn at a condition that is not known."""
        unknown = (*self.unknown, (condition, turn))
        return Outcome(
            dict(self.values), list(self.commands), unknown, dict(self.functions), self.ended
        )


def outcomes_of(text: str, given: Mapping[str, str]) -> list[Outcome]:
    """All ways through a script.

    Args:
        text: of the script.
        given: variables that are known before it.

    Raises:
        ValueError: a text that no shell reads, or too many ways.
    """
    script = _Script()
    found = script.run(tokens(text), Outcome(dict(given)))
    for one, _ in found:
        one.commands = [[script.words.shown(word) for word in c] for c in one.commands]
    return [one for one, _ in found]


class _Script:
    def __init__(self) -> None:
        self.words = Words()
        self._files: list[str] = []
        """Those that are being followed, by `source`."""

    def run(self, some: Tokens, start: Outcome) -> list[tuple[Outcome, Status]]:
        """Every outcome of a list of commands, with the status of the last of them."""
        found: list[tuple[Outcome, Status]] = [(start, True)]
        i, link, before = 0, ";", Tokens()
        while i < len(some):
            if some[i][0] == "end":
                link, i = _link(link, some[i][1]), i + 1
                continue
            end = _end_of(some, i)
            part, after = some[i:end], []
            for one, status in found:
                if one.ended or not _goes_on(link, status):
                    after.append((one, status))
                elif link in ("&&", "||") and status is None:
                    names = self._unknown_in(before, one)
                    after.append((one.copy(names, 1), link == "||"))
                    after += self._step(part, one.copy(names, 0))
                else:
                    after += self._step(part, one)
            found, i, link, before = _distinct(after), end, ";", part
        return found

    def _step(self, part: Tokens, one: Outcome) -> list[tuple[Outcome, Status]]:
        first = part[0][1]
        if first == "!" and len(part) > 1:
            turned: dict[Status, Status] = {True: False, False: True}
            return [(x, turned.get(s, s)) for x, s in self._step(part[1:], one)]
        if first in _OPENS:
            inner = part[1:-1]
            if first == "if":
                return self._if(inner, one)
            return self._case(inner, one) if first == "case" else self._loop(first, inner, one)
        if first == "{":
            return self.run(part[1:-1], one)
        if ("word", "{") in part and (first == "function" or ("end", "()") in part[:3]):
            name = part[1][1] if first == "function" else first
            one.functions[name] = part[part.index(("word", "{")) + 1 : -1]
            return [(one, True)]
        return self._command(part, one)

    def _command(self, part: Tokens, one: Outcome) -> list[tuple[Outcome, Status]]:
        raw = [text for kind, text in part if kind == "word"]
        if raw and raw[0].startswith(("]]", "))")):
            return [(one, self._condition(raw[0], one))]
        declares = raw[:1] != [] and raw[0] in _DECLARES
        assigned = [_ASSIGNED.fullmatch(word) for word in raw[declares:]]
        if declares or None not in assigned:
            for found in filter(None, assigned):
                self._assign(one, *found.groups())
            return [(one, True)]
        words = [x for word in raw for x in self.words.split(word, one.values)]
        if not words:
            return [(one, True)]
        name = PurePath(words[0]).name
        if name in ("exit", "return"):
            one.ended = name
        if name in ("[", "test"):
            return [(one, self._condition(" ".join(raw[1 : len(raw) - (name == "[")]), one))]
        if name in ("true", ":", "false"):
            return [(one, name != "false")]
        for gone in words[1:] if name in ("unset", "read") else ():
            one.values.pop(gone, None)
        if name in one.functions:
            own = {str(n): word for n, word in enumerate(words[1:], 1)}
            one.values |= own
            found = self.run(one.functions.pop(name), one)
            for x, _ in found:
                x.ended = x.ended.removesuffix("return")
            return found
        if words[0] in SOURCES and (text := self._lines_of(words[1:2])) is not None:
            return self._sourced(words[1:], text, one)
        if name == "eval":
            return self.run(tokens(" ".join(words[1:])), one)
        here = next((text for kind, text in part if kind == "here"), None)
        if here is not None and name in ("sbatch", *_SHELLS):
            return self.run(tokens(here), one)
        if name == "sbatch" and (wrapped := _wrapped(words)) is not None:
            return self._inner(*wrapped, one)
        for n, word in enumerate(words[:-2]):
            if PurePath(word).name in _SHELLS:
                at = next((j for j in range(n + 1, len(words) - 1) if _is_c(words[j])), None)
                if at is not None and all(w.startswith("-") for w in words[n + 1 : at]):
                    return self._inner(words[:n], words[at + 1], one)
        one.commands.append(words)
        return [(one, _RAN)]

    def _lines_of(self, words: list[str]) -> str | None:
        """The text of a file that lies here, is not being followed, and is one."""
        if not words or words[0] in self._files:
            return None
        try:
            return Path(words[0]).read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return None

    def _sourced(self, words: list[str], text: str, one: Outcome) -> list[tuple[Outcome, Status]]:
        """The commands of a file that is named by the first word and called with the others."""
        one.values |= {str(n): word for n, word in enumerate(words[1:], 1)}
        self._files.append(words[0])
        found = self.run(tokens(text), one)
        self._files.pop()
        for x, _ in found:
            x.ended = x.ended.removesuffix("return")
        return found

    def _inner(self, before: list[str], text: str, one: Outcome) -> list[tuple[Outcome, Status]]:
        """The commands of `bash -c` or `--wrap`, which what stands before it starts."""
        own = len(one.commands)
        found = self.run(tokens(text), one)
        for x, _ in found:
            x.commands[own:] = [[*before, *command] for command in x.commands[own:]]
        return [(x, _RAN) for x, _ in found]

    def _assign(self, one: Outcome, name: str, adds: str, raw: str) -> None:
        before = one.values.get(name, "")
        if raw.startswith("("):
            parts = [part for kind, part in tokens(raw[1:-1]) if kind == "word"]
            value: Value = [x for part in parts for x in self.words.split(part, one.values)]
            if adds:
                value = [*([before] * bool(before) if isinstance(before, str) else before), *value]
        else:
            value = self.words.text(raw, one.values)
            if adds:
                value = (before if isinstance(before, str) else " ".join(before)) + value
        one.values[name] = value

    def _if(self, some: Tokens, one: Outcome) -> list[tuple[Outcome, Status]]:
        pending, done = [one], list[tuple[Outcome, Status]]()
        for keyword, part in _parted(some, ("then", "elif", "else")):
            if keyword in ("", "elif"):
                condition = part
                continue
            if keyword == "else":
                return done + [x for p in pending for x in self.run(part, p)]
            later = list[Outcome]()
            for p in pending:
                for at, status in self.run(condition, p):
                    if status is True:
                        done += self.run(part, at)
                    elif status is False:
                        later.append(at)
                    else:
                        names = self._unknown_in(condition, at)
                        later.append(at.copy(names, 1))
                        done += self.run(part, at.copy(names, 0))
            pending = later
        return [*done, *((p, True) for p in pending)]

    def _case(self, some: Tokens, one: Outcome) -> list[tuple[Outcome, Status]]:
        raw, rest = some[0][1], some[2:]
        value = self.words.text(raw, one.values)
        is_known = not variables(self.words.shown(value))
        done, pending = list[tuple[Outcome, Status]](), one
        for turn, part in enumerate(_clauses(rest)):
            end = part.index(("end", ")"))
            patterns = [self.words.text(t, one.values) for kind, t in part[:end] if kind == "word"]
            if "*" in patterns or (is_known and any(matches(value, p) for p in patterns)):
                return done + self.run(part[end + 1 :], pending)
            if not is_known:
                names = self._unknown_in(some[:1], one)
                done += self.run(part[end + 1 :], pending.copy(names, turn))
                pending = pending.copy(names, -1)
        return [*done, (pending, True)]

    def _loop(self, kind: str, some: Tokens, one: Outcome) -> list[tuple[Outcome, Status]]:
        """A loop once, with what it changes not known. One over a script's own arguments, of which
        a pasted one has none, is passed over."""
        (_, head), *bodies = _parted(some, ("do",))
        body = [x for _, part in bodies for x in part]
        names = {m[1] for kind_, t in body if kind_ == "word" and (m := _ASSIGNED.match(t))}
        if kind == "for":
            names.add(head[0][1])
        elif any(word in text for _, text in head for word in ("$#", "getopts", "$1")):
            return [(one, True)]
        for name in names:
            one.values.pop(name, None)
        found = self.run(body, one)
        for at, _ in found:
            for name in names:
                at.values.pop(name, None)
        return found

    def _unknown_in(self, condition: Tokens, one: Outcome) -> str:
        """The variables of a condition whose values are not known, or else all of it."""
        raw = " ".join(text.removeprefix("]]").removeprefix("))") for _, text in condition).strip(
            " \n;"
        )
        names = re.findall(r"\$\{?#?(\w+)", raw)
        unknown = [n for n in names if n not in one.values or variables(self._shown(one, n))]
        return ", ".join(f"${n}" for n in dict.fromkeys(unknown)) or raw

    def _shown(self, one: Outcome, name: str) -> str:
        value = one.values[name]
        return self.words.shown(value if isinstance(value, str) else " ".join(value))

    def _condition(self, raw: str, one: Outcome) -> bool | None:
        if raw.startswith("))"):
            return self._of_numbers(raw[2:], one)
        return self._any_of(tokens(raw.removeprefix("]]")), one)

    def _of_numbers(self, text: str, one: Outcome) -> bool | None:
        parts = re.split(r"(==|!=|<=|>=|<|>)", text)
        numbers = [self.words.number(part, one.values) for part in parts[::2]]
        if len(parts) != 3 or not all(numbers):
            return None
        return _COMPARED[_SIGNS[parts[1]]](int(numbers[0]), int(numbers[1]))

    def _any_of(self, some: Tokens, one: Outcome) -> bool | None:
        for sign, word, wins in (("||", "-o", True), ("&&", "-a", False)):
            at = next((i for i, (_, text) in enumerate(some) if text in (sign, word)), None)
            if at is not None:
                both = [self._any_of(some[:at], one), self._any_of(some[at + 1 :], one)]
                return wins if wins in both else None if None in both else not wins
        if some and some[0][1] == "!":
            found = self._any_of(some[1:], one)
            return None if found is None else not found
        return self._test([text for _, text in some], one)

    def _test(self, raw: list[str], one: Outcome) -> bool | None:
        texts = [self.words.shown(self.words.text(word, one.values)) for word in raw]
        unknown = [bool(variables(text)) for text in texts]
        if len(raw) == 1 and not unknown[0]:
            return texts[0] != ""
        if len(raw) == 2 and raw[0] in ("-n", "-z"):
            # What stands beside an unknown part is not empty.
            left = texts[1]
            for part in variables(left):
                left = left.replace(part, "")
            return None if unknown[1] and not left else (texts[1] != "") == (raw[0] == "-n")
        if len(raw) != 3 or unknown[0] or unknown[2]:
            return None
        a, how, b = texts
        if how in _COMPARED:
            is_number = all(re.fullmatch(r"-?\d+", x) for x in (a, b))
            return _COMPARED[how](int(a), int(b)) if is_number else None
        if how in ("=", "==", "!="):
            quoted = raw[2][:1] in "'\""
            return (a == b if quoted else matches(a, b)) == (how != "!=")
        return None


def _is_c(word: str) -> bool:
    return re.fullmatch(r"-\w*c", word) is not None


def _wrapped(words: list[str]) -> tuple[list[str], str] | None:
    """The flags of `sbatch` and the command that its `--wrap` holds; None without that."""
    for n, word in enumerate(words):
        if word.startswith("--wrap="):
            return words[:n] + words[n + 1 :], word.partition("=")[2]
        if word == "--wrap" and n + 1 < len(words):
            return words[:n] + words[n + 2 :], words[n + 1]
    return None


def _link(before: str, now: str) -> str:
    """What joins two commands, where a line may end behind it."""
    return before if now == "\n" and before in ("&&", "||", "|") else now


def _goes_on(link: str, status: Status) -> bool:
    """Whether the command behind a link is called."""
    return {"&&": status is not False, "||": status in (False, None)}.get(link, True)


def _end_of(some: Tokens, start: int) -> int:
    """Behind the command that begins at a token, or the `fi`, `esac`, `done` or bracket of it.

    Raises:
        ValueError: it has none.
    """
    closing, starts, i = list[str](), True, start
    while i < len(some):
        kind, text = some[i]
        if kind == "end" and not closing and not _defines(some, i):
            return i
        if kind == "end":
            starts = True
        elif starts and text in _OPENS:
            closing.append(_OPENS[text])
        elif starts and text == "{":
            closing.append("}")
        elif starts and closing and text == closing[-1]:
            closing.pop()
        elif starts and text in ("then", "else", "elif", "do", "!", "function"):
            i += 1 + (text == "function")
            continue
        if kind == "word":
            starts = False
        i += 1
    if closing:
        raise ValueError(f"{some[start][1]} has no {closing[0]}; paste the text whole")
    return i


def _defines(some: Tokens, i: int) -> bool:
    """Whether a token is the `()` of a function, or the end of its line."""
    before = some[:i][-2:]
    return some[i][1] == "()" or (some[i][1] == "\n" and before[-1:] == [("end", "()")])


def _parted(some: Tokens, keywords: tuple[str, ...]) -> list[tuple[str, Tokens]]:
    """A list of commands at the keywords that part it, each with what follows."""
    found: list[tuple[str, Tokens]] = [("", [])]
    i, starts = 0, False
    while i < len(some):
        kind, text = some[i]
        if kind == "word" and starts and text in keywords:
            found.append((text, []))
            i += 1
        elif kind == "end":
            starts = True
            found[-1][1].append(some[i])
            i += 1
            continue
        else:
            end = max(_end_of(some, i), i + 1)
            found[-1][1].extend(some[i:end])
            i = end
            starts = False
            continue
        starts = True
    return found


def _clauses(some: Tokens) -> list[Tokens]:
    """The branches of a `case`, as patterns, a bracket and commands."""
    found, own, depth = list[Tokens](), Tokens(), 0
    for kind, text in some:
        if kind == "word":
            depth += (text == "case") - (text == "esac")
        if kind == "end" and text.startswith((";;", ";&")) and not depth:
            found.append(own)
            own = []
        elif own or (kind, text) not in (("end", "\n"), ("end", "("), ("end", ";")):
            own.append((kind, text))
    return [x for x in [*found, own] if ("end", ")") in x]


def _distinct(some: list[tuple[Outcome, Status]]) -> list[tuple[Outcome, Status]]:
    """Outcomes that differ in more than how they came about.

    Raises:
        ValueError: too many.
    """
    kept: list[tuple[Outcome, Status]] = []
    for one, status in some:
        mine: Any = (one.values, one.commands, one.ended, status)
        if all(mine != (x.values, x.commands, x.ended, s) for x, s in kept):
            kept.append((one, status))
    if len(kept) > _MOST:
        names = ", ".join(dict.fromkeys(c for c, _ in kept[-1][0].unknown))
        raise ValueError(f"too many ways through the script; write the values of {names}")
    return kept
