"""Reads a command that starts Megatron-LM: its flags, its ranks, and the layout that it has now."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copus_ext.cost_model.spec_file import SpecError
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.equals import EQUAL, longer
from copus_ext.planner.explain import GIB
from copus_ext.planner.known_peaks import WORDS
from copus_ext.planner.plan import Plan, Ranked
from copus_ext.planner.request import OPTIONS, UsageProblem, configuration_of, is_number, sizes
from copus_ext.planner.run_flags import parsed_flags, specs, uneven_stages, without_effect
from copus_ext.planner.search import Planner
from copus_ext.planner.shell_script import SOURCES, Outcome, outcomes_of
from copus_ext.planner.shell_text import variables
from copus_ext.planner.timed import as_measured

FLAG = "--from-command"
_TWICE = f"{FLAG} and --megatron-args say the same; give one of them, once"
_OF_TORCH = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
_LAUNCHERS = {*_OF_TORCH, "deepspeed", "srun", "mpirun", "python", "python3"}
_COUNTS = ("nnodes", "nproc-per-node", "nodes", "N", "ntasks", "n", "ntasks-per-node")
_COUNTS += ("num-nodes", "num-gpus")
"""Flags of launchers that say how many ranks there are."""
_LAUNCHED = re.compile(r"(echo|printf|cat|ls|cp|mv|rm|sed|grep|chmod|git|ln|test|tee|wc|head)$")
"""Programs that do no more with another one than name it."""
_OTHERS = re.compile(r"pretrain_(bert|t5|retro|ict|realm|vision|vlm|mamba|hybrid|biencoder)")
"""Programs of Megatron-LM whose models are not those of `pretrain_gpt.py`."""
_SBATCH = re.compile(r"^[ \t]*#SBATCH[ \t]+([^#\n]*)", re.MULTILINE)
_SHAPES = ("pipeline_model_parallel_layout", "moe_layer_freq", "cp_comm_type")
"""Fields of the trainer that are texts, and matter for a plan."""
_UNLIKELY = 0.8
"""Probability to fit below which a command that may well run is doubted."""


def take_apart(args: argparse.Namespace) -> None:
    """Reads the text of `--from-command`: what follows the script is `megatron_args`, and the
    launcher says how many ranks there are, as (nodes, ranks of a node, `megatron_args`) in
    `launched`; a number that it does not say is None.

    Raises:
        UsageProblem: no text that starts one training, or more than one flag that says it.
    """
    if not args.from_command:
        return
    if args.megatron_args is not None or len(args.from_command) > 1:
        raise UsageProblem(_TWICE)
    text = _read(args.from_command[0])
    of_job = [word for line in _SBATCH.findall(text) for word in line.split()]
    try:
        outcomes = outcomes_of(text, _of_slurm(args, of_job))
    except ValueError as error:
        raise UsageProblem(f"{FLAG}: {error}") from None
    args.absent = _absent(outcomes)
    before, script, flags = _training(outcomes, of_job)
    if _OTHERS.match(script):
        raise UsageProblem(f"{FLAG}: {script} trains no GPT; only pretrain_gpt.py is priced")
    if unknown := [*_unknown_of_launcher(before), *_unknown_of_training(flags)]:
        names = ", ".join(dict.fromkeys(unknown))
        fix = "write the values, or the lines that assign them"
        fix += f"; {_of_absent(args.absent, 'it')}" if args.absent else ""
        raise UsageProblem(f"{FLAG} has {names}, which only a shell knows; {fix}")
    args.megatron_args = shlex.join(flags)
    args.launched = *_ranks(before), args.megatron_args


def _read(text: str) -> str:
    """A text, or that of the file which it names."""
    word = text.strip()
    if not word.endswith((".sh", ".sbatch", ".slurm")) or len(word.split()) != 1:
        return text
    try:
        return Path(word).read_text(encoding="utf-8", errors="replace")
    except OSError:
        fix = f'give its text, {FLAG} "$(cat {word})"'
        raise UsageProblem(f"{FLAG}: there is no file {word} here; {fix}") from None


def _of_slurm(args: argparse.Namespace, words: Sequence[str]) -> dict[str, str]:
    """What SLURM sets in a job, by flags of the planner or lines of the job itself."""
    nodes = getattr(args, "nodes", None) or _number(words, "nodes", "N")
    gpus = getattr(args, "gpus_per_node", None) or _number(words, "gpus-per-node", "gres")
    tasks = _number(words, "ntasks-per-node")
    every = _number(words, "ntasks", "n") or (nodes * tasks if nodes and tasks else None)
    found = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes),
        **dict.fromkeys(("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"), gpus),
        **dict.fromkeys(("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), tasks),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), every),
        "SLURM_CPUS_PER_TASK": _number(words, "cpus-per-task", "c"),
    }
    return {name: str(number) for name, number in found.items() if number}


_Training = tuple[list[str], str, list[str]]


def _training(outcomes: Sequence[Outcome], of_job: Sequence[str]) -> _Training:
    """The command of a script that trains: its launcher, its program and its flags.

    Raises:
        UsageProblem: there is none, or conditions that are not known lead to several.
    """
    every = [(one, found) for one in outcomes if (found := _trainings(one.commands))]
    if not every:
        raise UsageProblem(f"{FLAG} names no script; write torchrun ... pretrain_gpt.py FLAGS")
    told: list[tuple[Outcome, _Training, dict[str, str]]] = []
    for one, found in every:
        parts = [({**_effect(b, f), "program": script}) for b, script, f in found]
        if any(part != parts[0] for part in parts):
            raise UsageProblem(f"{FLAG} starts {len(found)} trainings; give one of them")
        before, script, flags = found[-1]
        told.append((one, ([*of_job, *before], script, flags), parts[-1]))
    if all(parts == told[0][2] for _, _, parts in told):
        # An unset variable, as most that are not known, takes the last way.
        return told[-1][1]
    raise UsageProblem(f"{FLAG}: {_undecided([(one, parts) for one, _, parts in told])}")


def _undecided(told: Sequence[tuple[Outcome, dict[str, str]]]) -> str:
    """Which condition leads to other trainings, to which, and what to do."""
    pairs = [(a, b) for i, a in enumerate(told) for b in told[:i] if a[1] != b[1]]
    turns = [{name for name, _ in {*a[0].unknown} ^ {*b[0].unknown}} for a, b in pairs]
    names = min(turns, key=len)
    every = dict.fromkeys(name for _, parts in told for name in parts)
    what = []
    for name in every:
        values = dict.fromkeys(parts.get(name, "not given") or "given" for _, parts in told)
        if len(values) > 1:
            what.append(f"{name} {' or '.join(values)}")
    more = f" and {len(what) - 3} more" if len(what) > 3 else ""
    fix = "leave only the branch that runs"
    if all(re.fullmatch(r"\$[A-Za-z_]\w*", name) for name in names):
        fix = f"write {min(names)[1:]}=... in a line above"
    return f"{', '.join(sorted(names))} decides {', '.join(what[:3])}{more}; {fix}"


def _trainings(commands: Sequence[Sequence[str]]) -> list[_Training]:
    """The commands that train, as launcher, program and flags; if no program has a name that says
    so, the last one."""
    found: list[_Training] = []
    for words in commands:
        at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        starts = at is not None and _LAUNCHED.match(Path(words[0]).name) is None
        if at is not None and starts:
            found.append((list(words[:at]), Path(words[at]).name, list(words[at + 1 :])))
    return [one for one in found if one[1].startswith("pretrain")] or found[-1:]


def _effect(before: Sequence[str], flags: Sequence[str]) -> dict[str, str]:
    """What of a command changes a plan: its flags with their values, and its ranks."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = [value] if value else []
        else:
            found.setdefault(name, []).append(word)
    kept = {n: " ".join(v) for n, v in found.items() if n in specs() and n not in without_effect()}
    nodes, per_node = _ranks(before)
    return {**kept, "nodes": str(nodes), "ranks of a node": str(per_node)}


def _ranks(before: Sequence[str]) -> tuple[int | None, int | None]:
    """Nodes and ranks of one, as a launcher says them."""
    if "deepspeed" in (Path(word).name for word in before):
        # Without a number it takes the nodes and the GPUs of a file, or those it finds.
        return _number(before, "num-nodes"), _number(before, "num-gpus")
    if {Path(word).name for word in before} & _OF_TORCH:
        # It takes one rank, and one node, where it is not told. A task of srun may start it.
        nodes = _number(before, "nnodes", absent=_number(before, "nodes", "N", absent=1))
        return nodes, _number(before, "nproc-per-node", absent=1)
    nodes, ranks = _number(before, "nodes", "N"), _number(before, "ntasks", "n")
    split = ranks // nodes if nodes and ranks and ranks % nodes == 0 else None
    return nodes, _number(before, "ntasks-per-node", absent=split)


def _unknown_of_launcher(words: Sequence[str]) -> list[str]:
    """Variables that may say how many ranks there are: words of their own, and values of such
    flags. Paths, addresses and the rank of a node do not matter."""
    starts = (i for i, word in enumerate(words) if Path(word).name in _LAUNCHERS)
    found, flag = [], ""
    for word in words[next(starts, 0) :]:
        if word.startswith("-"):
            flag, _, value = word.lstrip("-").replace("_", "-").partition("=")
        else:
            value = word
        if flag in ("", *_COUNTS):
            found += variables(value)
        if not word.startswith("-") or value:
            flag = ""
    return found


def _unknown_of_training(words: Sequence[str]) -> list[str]:
    """The same of the flags of a run, of which only texts, such as paths, and those without an
    effect on a plan do not matter."""
    found, flag, count = [], "", 0
    for word in words:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            count = int(bool(value))
        else:
            value, count = word, count + 1
        spec = specs().get(flag)
        is_text = flag != "" and (spec is None or (spec.kind is str and spec.choices is None))
        takes = count if spec is not None and spec.nargs is not None else 1
        is_free = (is_text or flag in without_effect()) and count <= takes
        if not is_free or (spec is not None and spec.dest in _SHAPES):
            found += variables(value)
    return found


def _number(words: Sequence[str], *names: str, absent: int | None = None) -> int | None:
    """The value of a flag of torchrun or srun, spelled with either dash; None for one that is no
    number.

    Args:
        words: of the launcher.
        names: of the flag.
        absent: the value without it.
    """
    for i, word in enumerate(words):
        flag, _, value = word.lstrip("-").replace("_", "-").partition("=")
        if flag in names:
            value = value or (words[i + 1] if i + 1 < len(words) else "")
            # With a kind of GPU it is KIND:NUMBER.
            value = value.rpartition(":")[2] if flag in ("gpus-per-node", "gres") else value
            return int(value) if is_number(value) and int(value) else None
    return absent


def fill_in(args: argparse.Namespace) -> None:
    """Takes batch and ranks from the command, where flags of the planner do not say them.

    Raises:
        UsageProblem: neither does, or --megatron-args says other flags.
    """
    if args.launched is None:
        return
    nodes, per_node, _ = args.launched
    if args.cluster is None and args.gpu is not None:
        if args.nodes is None and not (nodes and (per_node or args.gpus_per_node)):
            fix = "give --nodes and --gpus-per-node"
            raise UsageProblem(f"{FLAG} does not say how many ranks there are; {fix}")
        args.nodes = args.nodes or nodes
        args.gpus_per_node = args.gpus_per_node or per_node
    kind = args.cluster or "here"
    if kind != "here" and not kind.endswith(".json") and ":" not in kind and nodes and per_node:
        args.cluster = f"{kind}:{nodes * per_node}"
    if args.cluster is None and args.gpu is None:
        raise UsageProblem(f"{FLAG} does not say which GPUs; give --cluster, or --gpu")


def _absent(outcomes: Sequence[Outcome]) -> list[str]:
    """The files that a script sources and that do not lie here."""
    words = (c[1] for one in outcomes for c in one.commands if c[0] in SOURCES and len(c) > 1)
    return list(dict.fromkeys(words))


def _of_absent(names: Sequence[str], whose: str) -> str:
    """Says of files that were not read."""
    are, their = ("is", "its") if len(names) == 1 else ("are", "their")
    found = f"{' and '.join(names)}, which {whose} sources, {are} not here"
    return f"{found}: {their} lines were not read"


def notes(args: argparse.Namespace, world_size: int) -> list[str]:
    """What of the command was not read, and that the cluster is not as large as it."""
    found = [_of_absent(args.absent, "the command")] if args.absent else []
    nodes, per_node, _ = args.launched or (None, None, "")
    if nodes and per_node and nodes * per_node != world_size:
        ranks = f"the command has {nodes * per_node} ranks"
        found.append(f"{ranks}; it is priced on the {world_size} GPUs given")
    return found


def present(args: argparse.Namespace, batch: int, world_size: int) -> Configuration:
    """The configuration that the command has.

    Raises:
        UsageProblem: none of so many GPUs, or stages of unequal length.
    """
    text = completed(args, "")
    return configuration_of(text, global_batch_size=batch, world_size=world_size)


def completed(args: argparse.Namespace, text: str) -> str:
    """A CONFIG with what it leaves out as in the command, as far as both go together.

    Raises:
        UsageProblem: another text, or a command with stages of unequal length.
    """
    own = sizes("CONFIG", text, OPTIONS)
    words = _words_of_command(args, has_stages="pp" in own)
    for size, name in (("tp", "sp"), ("cp", "cp_comm_type"), ("pp", "vpp")):
        if own.get(size) == 1:
            words.pop(name, None)
    return ",".join(f"{name}={value}" for name, value in {**words, **own}.items())


def inherited(args: argparse.Namespace, text: str) -> str:
    """That a CONFIG takes its recomputation from the command; empty where it has its own, and
    without a CONFIG or a command."""
    if args.launched is None or not text or "recompute" in sizes("CONFIG", text, OPTIONS):
        return ""
    words = f"recompute={_words_of_command(args, has_stages=True)['recompute']}"
    return f"CONFIG says no recompute: {words} is taken, as the command has it"


def _words_of_command(args: argparse.Namespace, *, has_stages: bool = False) -> dict[str, Any]:
    """The parts of the CONFIG of the command, by name; its stages count unless others are given."""
    given = parsed_flags(args.megatron_args)
    if (uneven := uneven_stages(given)) and not has_stages:
        fix = "`explain CONFIG` with a pp that divides the layers prices stages of equal length"
        raise UsageProblem(f"stages of unequal length ({uneven[0]}) are not priced; {fix}")
    tp, pp = given.tensor_model_parallel_size or 1, given.pipeline_model_parallel_size or 1
    vpp = given.num_virtual_stages_per_pipeline_rank or 1
    if layers := given.num_layers_per_virtual_pipeline_stage:
        vpp = max(given.num_layers // pp // layers, 1)
    found: dict[str, Any] = {"tp": tp, "pp": pp, "vpp": vpp, "cp": given.context_parallel_size or 1}
    found["ep"] = given.expert_model_parallel_size or 1
    if given.expert_tensor_parallel_size:
        found["etp"] = given.expert_tensor_parallel_size
    found["micro_batch"] = given.micro_batch_size or 1
    how = given.recompute_granularity or ("selective" if given.recompute_activations else "none")
    if how == "full" and given.recompute_method == "block" and given.recompute_num_layers:
        how = f"block:{given.recompute_num_layers}"
    words: dict[str, Any] = {"recompute": how, "zero": int(given.use_distributed_optimizer)}
    if tp > 1:
        words["sp"] = int(given.sequence_parallel)
    words["overlap"] = int(given.overlap_grad_reduce)
    words["use_tp_pp_dp_mapping"] = int(given.use_tp_pp_dp_mapping)
    if found["cp"] > 1 and given.cp_comm_type:
        words["cp_comm_type"] = {"a2a+p2p": "p2p"}.get(given.cp_comm_type[0], given.cp_comm_type[0])
    return {**found, **words}


@dataclass(frozen=True, kw_only=True)
class Present:
    """What the layout of the command costs against the first row."""

    now: Ranked | None
    """Its price; None where it has none."""
    first: Ranked | None
    """The first row; None where nothing fits."""
    problem: str = ""
    """Why it has no price."""

    def line(self) -> str:
        if self.now is None:
            return f"your command: not priced: {self.problem}"
        p, c = self.now.prediction, self.now.configuration
        each = p.tokens_per_s / c.layout.world_size
        speed = f"{each:.0f} tokens/s/GPU, MFU {100 * p.mfu:.1f} %"
        line = f"your command: {c}: {p.step_s:.4g} s ({speed})"
        if self.first is not None and c == self.first.configuration:
            line += ", which is row 1"
        elif (more := self._more()) is not None:
            line += f", {abs(100 * more):.0f} % {'longer' if more >= 0 else 'shorter'} "
            line += "for a sample " if self._rounds(c) else ""
            line += "than row 1"
            line += ", too little to tell" if abs(more) <= EQUAL else ""
        if known := WORDS[p.peak_source]:
            return f"{line}; peak {p.peak_bytes / GIB:.1f} GiB, {known}"
        line += f"; its {p.peak_bytes / GIB:.1f} GiB fit with probability {p.fit_probability:.2f}"
        if p.fit_probability < _UNLIKELY:
            line += "; if it runs, everything needs less memory than is said here"
        return line

    @property
    def configuration(self) -> Configuration | None:
        return None if self.now is None else self.now.configuration

    def _rounds(self, c: Configuration) -> bool:
        """Whether a configuration has another batch than the first row."""
        first = self.first and self.first.configuration
        return first is not None and first.global_batch_size != c.global_batch_size

    def _more(self) -> float | None:
        """Its time for a sample over that of the first row, less 1."""
        if self.now is None or self.first is None:
            return None
        return longer(self.now.prediction, self.first.prediction)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        if self.now is None:
            return {"problem": self.problem}
        more = self._more()
        return {**self.now.to_json(0), **({} if more is None else {"longer_than_first": more})}


def present_of(args: argparse.Namespace, planner: Planner, plan: Plan) -> Present | None:
    """The layout of the command beside a plan; None where no command was given."""
    if args.launched is None:
        return None
    first = plan.ranked[0] if plan.ranked else None
    try:
        c = present(args, plan.global_batch_size, planner.cluster.world_size)
        found = planner.explain(c)
    except (UsageProblem, SpecError) as error:
        return Present(now=None, first=first, problem=str(error))
    if isinstance(found, Ranked):
        return Present(now=as_measured(planner, found), first=first)
    if found.code in ("memory", "dominated"):
        return Present(now=as_measured(planner, planner.priced(found.example)), first=first)
    return Present(now=None, first=first, problem=f"{found.detail}; {found.fix}")
