"""Loaded by every Python process that the launcher starts.

SIGUSR2 writes the stacks of all threads. Output comes in whole lines: unbuffered, the words of
several ranks would mix; buffered, what a killed rank printed would be lost.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import os
import signal
import sys


def _register() -> None:
    folder = os.environ.get("COPUS_TEST_STACKS")
    if folder:
        name = f"rank{os.environ['RANK']}" if "RANK" in os.environ else "launcher"
        file = open(os.path.join(folder, f"{name}.{os.getpid()}.txt"), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # torchrun starts its workers with -u, which is write-through.
                stream.reconfigure(line_buffering=True, write_through=False)


def _load_the_one_behind_this() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if os.path.abspath(entry) != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
    finally:
        sys.path[:] = path


_register()
_load_the_one_behind_this()
