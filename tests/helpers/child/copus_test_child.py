"""What every Python process of a launch does first.

SIGUSR2 writes the stacks of all threads. Output comes in whole lines: unbuffered, the words of
several ranks would mix; buffered, what a killed rank printed would be lost. COPUS_TEST_STEP_S is
slept before each training step, so that a run on any machine lasts until it is disturbed.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import io
import os
import signal
import sys
import time


def _register() -> None:
    # A shell starts what it puts into the background without it, and ranks are interrupted here.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = os.environ.get("COPUS_TEST_STACKS")
    if folder:
        name = f"rank{os.environ['RANK']}" if "RANK" in os.environ else "launcher"
        file = open(os.path.join(folder, f"{name}.{os.getpid()}.txt"), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # torchrun starts its workers with -u, which is write-through.
                stream.reconfigure(line_buffering=True, write_through=False)


class _SlowSteps:
    """Finds the module of the training step, once, and wraps what is in it."""

    def find_spec(self, name, path=None, target=None):
        if name != "megatron.trainer.train.step":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_slow(module):
            load(module)
            plain = module.train_step

            def train_step(job):
                time.sleep(float(os.environ["COPUS_TEST_STEP_S"]))
                return plain(job)

            module.train_step = train_step

        spec.loader.exec_module = load_slow
        return spec


def load_hidden_sitecustomize() -> None:
    """Imports the `sitecustomize` that ours hides."""
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


def prepare() -> None:
    """Does what the environment asks for."""
    _register()
    if "COPUS_TEST_STEP_S" in os.environ:
        sys.meta_path.insert(0, _SlowSteps())
