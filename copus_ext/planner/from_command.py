"""Reads a command that starts Megatron-LM: its flags, its ranks, and the layout that it has now."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copus_ext.cost_model.spec_file import SpecError
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.equals import EQUAL
from copus_ext.planner.explain import GIB
from copus_ext.planner.given_flags import specs
from copus_ext.planner.known_peaks import WORDS
from copus_ext.planner.plan import Plan, Ranked
from copus_ext.planner.request import UsageProblem, configuration_of, is_number, parsed_flags
from copus_ext.planner.search import Planner
from copus_ext.planner.shell_text import up_to_end, variables, words_of

FLAG = "--from-command"
_TWICE = f"{FLAG} and --megatron-args say the same; give one of them, once"
_OF_TORCH = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
_LAUNCHERS = {*_OF_TORCH, "srun", "mpirun", "python", "python3"}
_COUNTS = ("nnodes", "nproc-per-node", "nodes", "N", "ntasks", "n", "ntasks-per-node")
"""Flags of launchers that say how many ranks there are."""
_SHAPES = ("pipeline_model_parallel_layout", "moe_layer_freq", "cp_comm_type")
"""Fields of the trainer that are texts, and matter for a plan."""
_UNLIKELY = 0.8
"""Probability to fit below which a command that may well run is doubted."""
_UNEVEN = (
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers"),
    *("decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split"),
    "account_for_loss_in_pipeline_split",
)


class FromCommand(argparse.Action):
    """Takes `torchrun LAUNCHER-FLAGS pretrain_gpt.py FLAGS` apart: what follows the script is
    `megatron_args`, and the launcher says how many ranks there are, as (nodes, ranks of a node,
    `megatron_args`) in `launched`; a number that it does not say is None."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            words = words_of(str(values))
        except ValueError as error:
            parser.error(f"{FLAG}: {error}")
        script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        if script is None:
            parser.error(f"{FLAG} names no script; write torchrun ... pretrain_gpt.py FLAGS")
        before, flags = words[:script], up_to_end(words[script + 1 :])
        if unknown := [*_unknown_of_launcher(before), *_unknown_of_training(flags)]:
            names = ", ".join(dict.fromkeys(unknown))
            fix = "write the values, or the lines that assign them"
            parser.error(f"{FLAG} has {names}, which only a shell knows; {fix}")
        if namespace.megatron_args is not None:
            parser.error(_TWICE)
        namespace.megatron_args = shlex.join(flags)
        if {Path(word).name for word in before} & _OF_TORCH:
            # It takes one rank, and one node, where it is not told. A task of srun may start it.
            nodes = _number(before, "nnodes", absent=_number(before, "nodes", "N", absent=1))
            per_node = _number(before, "nproc-per-node", absent=1)
        else:
            nodes, ranks = _number(before, "nodes", "N"), _number(before, "ntasks", "n")
            split = ranks // nodes if nodes and ranks and ranks % nodes == 0 else None
            per_node = _number(before, "ntasks-per-node", absent=split)
        namespace.launched = nodes, per_node, namespace.megatron_args


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
    """The same of the flags of a run, of which only texts, such as paths, do not matter."""
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
        if not is_text or count > takes or (spec is not None and spec.dest in _SHAPES):
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
            return int(value) if is_number(value) and int(value) else None
    return absent


def fill_in(args: argparse.Namespace) -> None:
    """Takes batch and ranks from the command, where flags of the planner do not say them.

    Raises:
        UsageProblem: neither does, or --megatron-args says other flags.
    """
    if args.launched is None:
        return
    nodes, per_node, flags = args.launched
    if args.megatron_args is not flags:
        raise UsageProblem(_TWICE)
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


def ranks_note(args: argparse.Namespace, world_size: int) -> str:
    """Says so where the cluster is not as large as the command; else empty."""
    nodes, per_node, _ = args.launched or (None, None, "")
    if not (nodes and per_node) or nodes * per_node == world_size:
        return ""
    return f"the command has {nodes * per_node} ranks; it is priced on the {world_size} GPUs given"


def present(args: argparse.Namespace, batch: int, world_size: int) -> Configuration:
    """The configuration that the command has.

    Raises:
        UsageProblem: none of so many GPUs, or stages of unlike length.
    """
    given = parsed_flags(args.megatron_args)
    if uneven := [n for n in _UNEVEN if n in given.explicit_flags]:
        raise UsageProblem(f"{FLAG}: stages of unlike length ({uneven[0]}) are not priced; drop it")
    tp, pp = given.tensor_model_parallel_size or 1, given.pipeline_model_parallel_size or 1
    vpp = given.num_virtual_stages_per_pipeline_rank or 1
    if layers := given.num_layers_per_virtual_pipeline_stage:
        vpp = max(given.num_layers // pp // layers, 1)
    sizes: dict[str, Any] = {"tp": tp, "pp": pp, "vpp": vpp, "cp": given.context_parallel_size or 1}
    sizes["ep"] = given.expert_model_parallel_size or 1
    if given.expert_tensor_parallel_size:
        sizes["etp"] = given.expert_tensor_parallel_size
    sizes["micro_batch"] = given.micro_batch_size or 1
    how = given.recompute_granularity or ("selective" if given.recompute_activations else "none")
    if how == "full" and given.recompute_method == "block" and given.recompute_num_layers:
        how = f"block:{given.recompute_num_layers}"
    words = {"recompute": how, "zero": int(given.use_distributed_optimizer)}
    words["sp"] = int(tp > 1 and given.sequence_parallel)
    words["overlap"] = int(given.overlap_grad_reduce)
    words["use_tp_pp_dp_mapping"] = int(given.use_tp_pp_dp_mapping)
    if sizes["cp"] > 1 and given.cp_comm_type:
        words["cp_comm_type"] = {"a2a+p2p": "p2p"}.get(given.cp_comm_type[0], given.cp_comm_type[0])
    text = ",".join(f"{name}={value}" for name, value in {**sizes, **words}.items())
    return configuration_of(text, global_batch_size=batch, world_size=world_size)


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
        line = f"your command: {c}: {p.step_s:.4g} s"
        if self.first is not None and c == self.first.configuration:
            line += ", which is row 1"
        elif (more := self._more()) is not None:
            line += f", {abs(100 * more):.0f} % {'longer' if more >= 0 else 'shorter'} than row 1"
            line += ", too little to tell" if abs(more) <= EQUAL else ""
        if known := WORDS[p.peak_source]:
            return f"{line}; peak {p.peak_bytes / GIB:.1f} GiB, {known}"
        line += f"; its {p.peak_bytes / GIB:.1f} GiB fit with probability {p.fit_probability:.2f}"
        if p.fit_probability < _UNLIKELY:
            line += "; if it runs, everything needs less memory than is said here"
        return line

    def _more(self) -> float | None:
        """Its time over that of the first row, less 1."""
        if self.now is None or self.first is None:
            return None
        return self.now.prediction.step_s / self.first.prediction.step_s - 1

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
        return Present(now=found, first=first)
    if found.code in ("memory", "dominated"):
        return Present(now=planner.priced(c), first=first)
    return Present(now=None, first=first, problem=f"{found.detail}; {found.fix}")
