"""The command line of the supervisor."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from copus_ext.launch.launchers import Launcher, launcher_kinds, launcher_of
from copus_ext.launch.rendezvous import MAX_LOCAL_RANKS, MAX_NODES
from copus_ext.launch.restart_policy import CrashLimits
from copus_ext.launch.slurm import Step, address_of, read_step
from copus_ext.reshard.relaunch import value_of
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.gpus import check_torch_build, visible_gpus
from megatron.trainer.common.program import program_name, with_hint

_ROOT = Path(__file__).resolve().parents[2]
_MODULE = "python -m copus_ext.launch.supervisor"
_TRAINER = "pretrain_gpt.py"
_RUN_DIR_FLAGS = ("--run-dir", "--save", "--tensorboard-dir")
"""The first of these that is given names the directory of the run."""
_DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Options:
    nnodes: int
    """Nodes of the job, at most."""
    min_nodes: int
    """Nodes with which it may start."""
    node_rank: int
    """Number of this one; 0 decides for all."""
    nproc_per_node: int
    """Ranks that it can start."""
    endpoint: str
    """`host:port` of node 0, at which all ranks meet; empty with one node."""
    limits: CrashLimits
    """Crashes after which the run goes on."""
    stop_margin_s: float
    """Seconds that saving may take, before a second signal ends the ranks."""
    join_timeout_s: float
    """Seconds to wait for the other nodes at the start."""
    node_timeout_s: float
    """A node that is silent for so long is lost."""
    program: tuple[str, ...]
    """The words between `python` and the flags of a rank."""
    flags: tuple[str, ...]
    called_as: str
    """The user's command without the flags."""
    has_gpu: bool
    """Whether ranks train on GPUs."""
    launcher: Launcher | None = None
    """Of launches that go on without lost ranks; None for torch's, where one ends the launch."""
    step: Step | None = None
    """The place of this process in a step of SLURM; None outside of one."""

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run; None if the flags name none."""
        found = (value_of(self.flags, flag) for flag in _RUN_DIR_FLAGS)
        return next((Path(value) for value in found if value), None)

    @property
    def command(self) -> str:
        """A shell command that goes on with the run."""
        flags = list(self.flags)
        save = value_of(flags, "--save")
        if save is not None and value_of(flags, "--load") is None:
            flags += ["--load", save]
        return f"{self.called_as} {shlex.join(flags)}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{with_hint(self, message)}; for the flags see: {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program_name(_MODULE),
        usage="%(prog)s [flags] -- [PROGRAM] FLAGS_OF_PROGRAM",
        description="Starts the ranks of a run on this node. Starts them again when the run asks "
        "for it or crashes. Under srun with one task a node, nodes and address come from SLURM. "
        f"PROGRAM is the trainer ({_TRAINER}) unless another is named.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    words = "".join(f"; MIN:MAX with {kind.flag}" for kind in launcher_kinds())
    add("--nnodes", help=f"nodes of the job, with a supervisor on each (1){words}")
    add("--node-rank", type=int, help="number of this node (0); node 0 leads the others")
    add("--nproc-per-node", type=int, help="ranks on this node (the GPUs it sees, else 1)")
    add("--rdzv-endpoint", help="HOST:PORT of node 0; needed with several nodes")
    add("--max-crashes", type=int, default=10, help="give up after more crashes than this (10)")
    add("--max-crashes-per-hour", type=int, default=3, help="the same within an hour (3)")
    add("--restart-wait", type=float, help="seconds before starting again (5, then 15, then 45)")
    add("--stop-margin-s", type=float, default=600, help="a second TERM ends the ranks after this")
    add("--join-timeout-s", type=float, default=600, help="wait so long for the other nodes")
    add("--node-timeout-s", type=float, default=120, help="a node silent for so long is lost")
    for kind in launcher_kinds():
        kind.add_flags(parser)
    add("--called", help="the user's command, for the hint that is printed at the end")
    return parser


def read_options(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Options:
    """Reads the command line.

    Args:
        argv: words after the name of the module.

    Raises:
        UsageError: one line with the flag and the fix.
    """
    env = os.environ if env is None else env
    own = list(argv[: argv.index("--")] if "--" in argv else argv)
    words = list(argv[len(own) + 1 :])
    given = _parser().parse_args(own)
    if not words:
        name = program_name(_MODULE)
        raise UsageError(f"no flags of the run given; end with: -- {_TRAINER} FLAGS; see {name} -h")
    device = value_of(words, "--device") or "auto"
    named = () if words[0].startswith("-") else (words[0],)
    if not named or Path(*named).name == _TRAINER:
        check_torch_build(device, env)
    gpus = visible_gpus(env)
    nproc = (gpus or 1) if given.nproc_per_node is None else given.nproc_per_node
    step = read_step(env)
    launcher = launcher_of(given)
    least, given.nnodes = _node_numbers(given, goes_on=launcher is not None)
    nnodes, node, endpoint = _place(given, step)
    _check_between("--nnodes", nnodes, 1, MAX_NODES)
    _check_between("--node-rank", node, 0, nnodes - 1)
    _check_between("--nproc-per-node", nproc, 1, MAX_LOCAL_RANKS)
    for name in ("stop_margin_s", "join_timeout_s", "node_timeout_s"):
        if not getattr(given, name) >= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 0")
    try:
        waits = {} if given.restart_wait is None else {"waits_s": (given.restart_wait,)}
        limits = CrashLimits(
            per_hour=given.max_crashes_per_hour, per_run=given.max_crashes, **waits
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Options(
        nnodes=nnodes,
        min_nodes=least or nnodes,
        node_rank=node,
        nproc_per_node=nproc,
        endpoint=endpoint,
        limits=limits,
        stop_margin_s=given.stop_margin_s,
        join_timeout_s=given.join_timeout_s,
        node_timeout_s=given.node_timeout_s,
        program=_program(*named) if named else _trainer(),
        flags=tuple(words[len(named) :]),
        called_as=given.called or shlex.join([*program_name(_MODULE).split(), *own, "--", *named]),
        # A program of the user's that has this flag means the same by it.
        has_gpu=gpus > 0 and device != "cpu",
        launcher=launcher,
        step=step,
    )


def _node_numbers(given: argparse.Namespace, *, goes_on: bool) -> tuple[int | None, int | None]:
    """The least and the most of `--nnodes`; None where it is not given."""
    if given.nnodes is None:
        return None, None
    least, colon, most = given.nnodes.partition(":")
    numbers = [least, most] if colon else [least]
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"--nnodes {given.nnodes} must be a number, or MIN:MAX")
    if colon and not goes_on:
        flags = "".join(f"needs {kind.flag}; or " for kind in launcher_kinds())
        raise UsageError(f"--nnodes {given.nnodes}: {flags}give one number")
    if not 1 <= int(least) <= int(numbers[-1]):
        raise UsageError(f"--nnodes {given.nnodes} must be MIN:MAX with 1 <= MIN <= MAX")
    return int(least), int(numbers[-1])


def _check_between(flag: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise UsageError(f"{flag} {value} must be between {lowest} and {highest}")


def _place(given: argparse.Namespace, step: Step | None) -> tuple[int, int, str]:
    """Number of nodes, number of this one, `host:port` of the first; flags win over SLURM."""
    endpoint = given.rdzv_endpoint
    if given.nnodes is not None or step is None:
        nnodes, node = given.nnodes, given.node_rank
        nnodes, node = 1 if nnodes is None else nnodes, 0 if node is None else node
    else:
        nnodes, node = step.num_nodes, step.node_rank
        if step.num_local_tasks > 1:
            raise UsageError("one supervisor a node is enough: srun --ntasks-per-node=1")
        if nnodes > 1 and endpoint is None:
            endpoint = f"{address_of(step.head)}:{step.port}"
    if endpoint is None:
        if nnodes > 1:
            raise UsageError(f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT of node 0")
        return nnodes, node, ""
    host, colon, port = endpoint.rpartition(":")
    host, port = (host, port) if colon else (endpoint, str(_DEFAULT_PORT))
    if not host or not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UsageError(f"--rdzv-endpoint {endpoint} must be HOST:PORT")
    return nnodes, node, f"{host}:{port}" if nnodes > 1 else ""


def _program(word: str) -> tuple[str, ...]:
    """A file seen from the current folder, else from the repository. The trainer needs neither."""
    for path in (Path(word), _ROOT / word):
        if path.is_file():
            return (str(path),)
    if word == _TRAINER:
        return _trainer()
    raise UsageError(f"there is no program {word}")


def _trainer() -> tuple[str, ...]:
    """The trainer as a module. Under `copus launch` its messages say `copus pretrain`."""
    if program_name(_MODULE) == _MODULE:
        return "-m", "copus_ext.commands.pretrain"
    return "-m", "copus_ext.commands.main", "pretrain"
