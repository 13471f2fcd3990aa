"""The name that usage and error lines give to a command, and how one ends."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import io
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from megatron.trainer.common.signals import SAME_S

_given: str | None = None
_NEAR = 0.7
"""How alike a wrong word and a hint must be: difflib's ratio, from 0 to 1."""
_HELD_S = 10.0
"""Seconds for which output is held back: a start that lasts longer must not look dead."""


def print_line(text: str) -> None:
    """Prints text and its end in one write. Under torchrun ranks share an output without a buffer,
    where two writes let what another rank says come between them."""
    print(f"{text}\n", end="", flush=True)


def program_name(script: str) -> str:
    """Returns the name by which the user called the running command.

    Args:
        script: name of the file that starts the command from a checkout, such as `plan.py`. It is
            the answer unless `running_as` says otherwise.
    """
    return script if _given is None else _given


@contextlib.contextmanager
def running_as(name: str) -> Iterator[None]:
    """Gives the command that runs inside this context another name, such as `copus plan`."""
    global _given
    before, _given = _given, name
    try:
        yield
    finally:
        _given = before


def tell(script: str, text: str) -> None:
    """Prints one line on standard error, after the name of the command.

    Args:
        script: as in `program_name`.
        text: such as `error: ...` or `note: ...`.
    """
    print(f"{program_name(script)}: {text}", file=sys.stderr, flush=True)


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean WORD?` with the known word that is most alike; empty if none is."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]}?" if near else ""


def unknown(word: str, known: Sequence[str]) -> str:
    """`unknown`, with the known word that was probably meant, in any case of letters, and all of
    them."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=_NEAR)
    hint = f"; did you mean {names[near[0]]}? Known: " if near else "; known: "
    return f"unknown{hint}{', '.join(known)}"


def refused(script: str, problem: str, code: int) -> int:
    """Tells why a command cannot work; returns its exit code."""
    tell(script, f"error: {problem}")
    return code


def with_hint(parser: argparse.ArgumentParser, message: str) -> str:
    """An error of argparse, with the flag that an unknown one probably meant."""
    words = message.removeprefix("unrecognized arguments: ").split()
    if not message.startswith("unrecognized arguments: "):
        return message
    known = [s for action in parser._actions for s in action.option_strings]
    flags = (word.partition("=")[0] for word in words if word.startswith("-"))
    return message + next(filter(None, (nearest(flag, known) for flag in flags)), "")


def about(script: str, text: str | None) -> dict[str, Any]:
    """Settings of the parser of a command: its name as it was called, and the first line of its
    module's docstring. Flags have no abbreviations."""
    first = (text or "").splitlines()[0]
    return {"prog": program_name(script), "description": first, "allow_abbrev": False}


class CommandParser(argparse.ArgumentParser):
    """A parser without abbreviations, which says what an unknown flag probably meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        super().error(with_hint(self, message))


class _HeldOutput:
    """Stands in for standard output. It stays in place when it has let go, since a library may have
    changed its methods to read along."""

    def __init__(self, real: TextIO) -> None:
        self._real, self._held = real, list[str]()
        self._holds, self._owner = True, os.getpid()
        self._lock = threading.RLock()  # a handler of a signal may print while it is taken

    def write(self, text: str) -> int:
        if self._is_own():
            with self._lock:
                if self._holds:
                    self._held.append(text)
                    return len(text)
        return self._real.write(text)

    def flush(self) -> None:
        if not (self._holds and self._is_own()):
            self._real.flush()

    def _is_own(self) -> bool:
        """Not in a forked process, which would never let go."""
        return os.getpid() == self._owner

    def let_go(self) -> None:
        with self._lock:
            if self._holds:
                self._holds = False
                self._real.write("".join(self._held))
                self._real.flush()

    def drop(self) -> None:
        with self._lock:
            self._holds = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextlib.contextmanager
def held_back(*refusals: type[Exception]) -> Iterator[Callable[[], None]]:
    """Keeps what is printed inside until the function that it gives is called, or to its end, or
    for `_HELD_S`. One of the `refusals` before that drops it, so that its line stands alone."""
    real = sys.stdout
    held = _HeldOutput(real)
    sys.stdout = held  # pyright: ignore[reportAttributeAccessIssue]
    timer = threading.Timer(_HELD_S, held.let_go)
    timer.daemon = True
    timer.start()
    try:
        yield held.let_go
    except refusals:
        held.drop()
        raise
    finally:
        timer.cancel()
        held.let_go()
        if sys.stdout is held:
            sys.stdout = real


class OutputFailed(BaseException):
    """Standard output did not take what was printed. No `OSError`, so that no command takes it for
    an error of its files.

    Args:
        error: what the system said.
        program: name of the command that printed.
    """

    def __init__(self, error: OSError, program: str) -> None:
        super().__init__(str(error))
        self.error, self.program = error, program


class _Output:
    """Stands in for standard output and tells its errors apart from others."""

    def __init__(self, real: TextIO, script: str) -> None:
        self._real, self._script = real, script

    def write(self, text: str) -> int:
        with self._failing():
            return self._real.write(text)

    def flush(self) -> None:
        with self._failing():
            self._real.flush()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputFailed(error, program_name(self._script)) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_interrupted_by, _interrupted_s = 0, 0.0
"""The signal that has interrupted the running command, 0 if none has, and when it did."""


def was_interrupted() -> bool:
    """Whether Ctrl-C or SIGTERM has asked the running command to end. What it raised may have been
    swallowed, or turned into another error, as within an import."""
    return bool(_interrupted_by)


def ending_at_interrupts(script: str, run: Callable[[], int], *, sigterm: bool = False) -> int:
    """Runs a command and ends it with one line where it was interrupted, whatever error came of it.

    Args:
        script: as in `program_name`.
        run: the command; returns its exit code. One that takes Ctrl-C for a plain end returns 0.
        sigterm: SIGTERM ends it in the same way, so that it clears up after itself.

    Returns:
        The exit code: that of the command, 130 for Ctrl-C, 143 for SIGTERM.
    """
    global _interrupted_by
    code = 0
    try:
        with _noting_interrupts(sigterm=sigterm):
            code = run()
        number = _interrupted_by if code else 0
    except KeyboardInterrupt as interrupt:
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
    except (SystemExit, OutputFailed):
        raise
    except BaseException:
        number = _interrupted_by
        if not number:
            raise
    finally:
        _interrupted_by = 0
    # With that code the command has said so itself.
    if number and code != 128 + number:
        tell(script, "ended by SIGTERM" if number == signal.SIGTERM else "interrupted")
        code = 128 + number
    return code


def _interrupt(number: int, _: object) -> None:
    global _interrupted_by, _interrupted_s
    now_s = time.monotonic()
    if _interrupted_by and now_s - _interrupted_s <= SAME_S:
        return  # the same one, which must not cut off what clears up
    _interrupted_by, _interrupted_s = number, now_s
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def _noting_interrupts(*, sigterm: bool) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    free: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
    if sigterm:
        free[signal.SIGTERM] = signal.SIG_DFL
    taken = {number: old for number, old in free.items() if signal.getsignal(number) is old}
    for number in taken:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, old in taken.items():
            signal.signal(number, old)


def with_output(script: str, run: Callable[[], int]) -> int:
    """Runs a command that prints an answer, and ends it where standard output does not take it.

    Characters that the output cannot encode are replaced.

    Args:
        script: as in `program_name`.
        run: the command; returns its exit code.

    Returns:
        The exit code: that of the command, 0 where the reader of the output has gone, and 1, after
        one line, where the output failed in another way.
    """
    real = sys.stdout
    if real is None:  # pyright: ignore[reportUnnecessaryComparison]  # it was closed at the start
        return run()
    if isinstance(real, io.TextIOWrapper):
        real.reconfigure(errors="replace")
    output = _Output(real, script)
    sys.stdout = output  # pyright: ignore[reportAttributeAccessIssue]
    try:
        try:
            return run()
        finally:
            output.flush()
    except OutputFailed as failure:
        _discard(real)
        if isinstance(failure.error, BrokenPipeError):
            return 0
        reason = failure.error.strerror or str(failure.error)
        print(f"{failure.program}: error: standard output: {reason}", file=sys.stderr, flush=True)
        return 1
    finally:
        sys.stdout = real


def _discard(output: TextIO) -> None:
    """Lets go what is left in the buffer, so that Python does not complain of it at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output.fileno())
        os.close(nowhere)
        output.flush()


def run_command(
    script: str,
    run: Callable[[], int],
    *,
    on_failure: Callable[[int, str], None] = lambda code, text: None,
) -> int:
    """Runs an offline command and turns an error into one line and an exit code.

    Args:
        script: as in `program_name`.
        run: the command; returns its exit code.
        on_failure: called with exit code and reason before the line is printed.

    Returns:
        The exit code: that of the error, 1 for the file system, 130 for Ctrl-C, 143 for SIGTERM,
        and 3 for any other error, which odd contents cause.
    """
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    told = functools.partial(_with_errors_told, script, run, on_failure)
    return ending_at_interrupts(script, told, sigterm=True)


def _with_errors_told(
    script: str, run: Callable[[], int], on_failure: Callable[[int, str], None]
) -> int:
    try:
        return run()
    except Exception as error:
        if was_interrupted():
            raise
        text = " ".join(str(error).split())
        code = getattr(error, "exit_code", None)
        if code is None and isinstance(error, (OSError, MemoryError)):
            code, text = 1, text or type(error).__name__
        elif isinstance(error, ImportError):
            code, text = 1, f"a package cannot be imported ({text[:200]}); see PYTHONPATH"
        elif code is None:
            code, kind = 3, type(error).__name__
            text = f"malformed, or of a kind that is not known ({kind}: {text[:200]})"
        on_failure(code, text)
        tell(script, f"error: {text}")
        return code


def json_failure(argv: Sequence[str] | None) -> Callable[[int, str], None]:
    """For `run_command`: prints a failure as a line of JSON where `--json` is among the flags.

    Args:
        argv: flags; None for those of the process.
    """

    def fail(code: int, text: str) -> None:
        if "--json" in (sys.argv[1:] if argv is None else argv):
            print(json.dumps({"status": "failed", "exit_code": code, "reason": text}))

    return fail


def other_command(script: str) -> str:
    """How a user of the running command calls another one, from the folder where the user is.

    That is `copus NAME` if this one was called so, or if there is no checkout. Else it is the
    script of the checkout. What is not on PATH is named by its place.

    Args:
        script: name of the file that starts the other command from a checkout.
    """
    path = Path(__file__).resolve().parents[3] / "tools" / script
    if path.is_file() and not (_given or "").startswith("copus "):
        here = Path("tools") / script
        there = here if here.is_file() and here.samefile(path) else path
        return f"{_program('python', sys.executable)} {shlex.quote(str(there))}"
    copus = Path(sys.executable).parent / "copus"
    return _program("copus", str(copus)) + " " + script.removesuffix(".py").replace("_", "-")


def _program(name: str, path: str) -> str:
    """The name of a program if PATH leads to the folder of the one at a path, or if that is none.

    The files themselves say nothing: those of virtual environments are links to one Python.
    """
    found = shutil.which(name)
    if not os.path.exists(path):
        return name
    is_there = found is not None and Path(found).parent.samefile(Path(path).parent)
    return name if is_there else shlex.quote(path)
