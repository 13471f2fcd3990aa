"""Reads the texts of the planner's flags: batches, sizes, model, cluster."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from copus_ext.cost_model.cluster_spec import ClusterSpec, here, of_gpu, preset
from copus_ext.cost_model.context import CP_COMM_TYPES
from copus_ext.cost_model.hugging_face import spec_of_config
from copus_ext.cost_model.megatron_flags import spec_of_arguments
from copus_ext.cost_model.model_spec import ATTENTION, IMPLEMENTATIONS, NORMS, ModelSpec, divisors
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.spec_file import SpecError, quantity
from copus_ext.planner.configuration import RECOMPUTE, Configuration
from copus_ext.planner.run_flags import parsed_flags, state_bytes
from copus_ext.planner.shell_text import flags_of
from megatron.trainer.common.program import unknown
from megatron.trainer.config.draft import flag_of
from megatron.trainer.config.layout import Layout

LARGEST = 2**31
"""Beyond this no size is taken."""
LOGITS_CHUNKS = (1, 2, 4, 8, 16, 32)
"""Parts of a rank's tokens that a search tries, as few as fit."""
GPUS_PER_NODE = 8
"""Of a node with `--nodes`, if nothing else is said."""
_IMPLEMENTED = ("implementation", "attention", "norm", "gradient_bytes", "optimizer_bytes")
"""Flags of a model that a name or a config.json does not say."""
_LINKS = {"intra_bytes_per_s": "--intra", "nic_bytes_per_s": "--nic"}
_MAPPING = "use_tp_pp_dp_mapping"
OPTIONS = ("recompute", "sp", "zero", "overlap", "cp_comm_type", "logits_chunks", _MAPPING)
"""What a CONFIG says besides sizes."""
_FLAGS_OF_SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
}
SIZES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "micro_batch")
_SIZE = re.compile(rf"({'|'.join(SIZES[:-1])})([1-9]\d{{0,9}})")
"""A size in the text of a layout."""


class UsageProblem(Exception):
    """Wrong flags or values."""


class InputProblem(Exception):
    """A file that is missing, unreadable or inconsistent."""


def reason_of(error: Exception) -> str:
    """What went wrong with a file, without the number of the error."""
    return getattr(error, "strerror", None) or str(error)


def batches(text: str) -> list[int]:
    """Reads `512`, `64,128`, `64:4096:x2` or `64:1024:+64`."""
    try:
        if ":" not in text:
            first = last = step = ""
            sizes = [int(part) for part in text.split(",")]
        else:
            first, last, step = (part.strip() for part in text.split(":"))
            sizes, size = [], int(first)
            if size < 1 or step[0] not in "x+" or int(step[1:]) < (2 if step[0] == "x" else 1):
                raise ValueError
            while size <= int(last):
                sizes.append(size)
                size = size * int(step[1:]) if step[0] == "x" else size + int(step[1:])
    except (ValueError, IndexError):
        raise UsageProblem(
            f"--global-batch-size {text}: write 512, or 64,128, or 64:4096:x2, or 64:256:+64"
        ) from None
    if not sizes:
        fix = f"write {last}:{first}:{step}"
        raise UsageProblem(f"--global-batch-size {text}: {last} is below {first}; {fix}")
    if min(sizes) < 1 or max(sizes) > LARGEST:
        raise UsageProblem(f"--global-batch-size {text}: sizes must be from 1 to {LARGEST}")
    return sorted(set(sizes))


def is_number(text: str) -> bool:
    """Whether a text is a whole number of a size that anything here can have."""
    return text.isascii() and text.isdecimal() and int(text) <= LARGEST


def sizes(flag: str, text: str, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Reads `tp=4,pp=2`; a layout's own text such as `tp4.pp2.dp8` may stand for its sizes. Where
    other words are known, which make a configuration, that text may lack some."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name in extra and value:
            found[name] = value
        elif name in SIZES and is_number(value) and int(value):
            found[name] = int(value)
        else:
            found |= _sizes_of_layout(flag, part, extra)
    return found


def _sizes_of_layout(flag: str, part: str, extra: tuple[str, ...]) -> dict[str, Any]:
    try:
        layout = Layout.from_text(part)
    except ValueError:
        layout = None
        some = [_SIZE.fullmatch(word) for word in part.split(".")] if extra else []
        found = {size[1]: int(size[2]) for size in some if size is not None}
        if found and len(found) == len(some) and max(found.values()) <= LARGEST:
            return found
    if layout is None or layout.layer_partition or layout.world_size > LARGEST:
        raise UsageProblem(
            f"{flag} {part}: write NAME=NUMBER with {', '.join((*SIZES, *extra))}, or a layout "
            "with all its sizes, for example tp2.pp2.dp4"
        )
    # A text without sizes of experts, or of context parallelism, has the usual ones.
    return {"cp": 1, "ep": 1, "etp": layout.tp, **layout.to_json()}


def configuration_of(
    text: str,
    *,
    global_batch_size: int,
    world_size: int,
    overlap: bool = True,
    use_tp_pp_dp_mapping: bool = False,
    sequence_parallel: bool = True,
) -> Configuration:
    """Reads `str(configuration)`, or parts of it such as `tp=2,pp=4` or `tp2.pp4`.

    Sizes that are left out are 1, that of tensor parallel experts is tp. The replicas fill the
    cluster. The last three arguments hold where the text does not say.

    Raises:
        UsageProblem: no configuration of so many GPUs.
    """
    given = sizes("CONFIG", text, OPTIONS)
    chunks = given.get("logits_chunks")
    if chunks is not None and not (is_number(chunks) and int(chunks)):
        raise UsageProblem(f"{text}: logits_chunks is a whole number from 1 on")
    tp, cp, pp = given.get("tp", 1), given.get("cp", 1), given.get("pp", 1)
    dp = world_size // (tp * cp * pp)
    if world_size % (tp * cp * pp) or given.get("dp", dp) != dp:
        factors = "tp x cp x pp x dp" if cp > 1 else "tp x pp x dp"
        fix = _filling({"tp": tp, "cp": cp, "pp": pp}, world_size)
        raise UsageProblem(f"{text}: {factors} is not {world_size} GPUs; {fix}")
    form = given.get("cp_comm_type")
    if form is not None and (form not in CP_COMM_TYPES or cp == 1):
        forms = ", ".join(CP_COMM_TYPES)
        raise UsageProblem(f"{text}: cp_comm_type goes with cp and is one of {forms}")
    recompute, _, layers = given.get("recompute", "none").partition(":")
    if recompute not in RECOMPUTE or (recompute == "block") != is_number(layers):
        ways = ", ".join(f"{r}:LAYERS" if r == "block" else r for r in RECOMPUTE)
        raise UsageProblem(f"{text}: recompute is one of {ways}")
    for name in ("zero", "overlap", _MAPPING):
        if given.get(name, "0") not in ("0", "1"):
            raise UsageProblem(f"{text}: {name} is 0 or 1")
    parallel = given.get("sp", str(int(tp > 1 and sequence_parallel)))
    if parallel not in ("0", "1") or (parallel == "1" and tp == 1):
        raise UsageProblem(f"{text}: sp is 0 or 1, and 1 goes with tp above 1; leave it out")
    try:
        experts = {"ep": given.get("ep", 1), "etp": given.get("etp")}
        layout = Layout(tp=tp, cp=cp, pp=pp, vpp=given.get("vpp", 1), dp=dp, **experts)
    except ValueError as error:
        raise UsageProblem(f"{text}: {error}") from error
    return Configuration(
        layout=layout,
        cp_comm_type=form,
        micro_batch_size=given.get("micro_batch", 1),
        global_batch_size=global_batch_size,
        recompute=recompute,
        recompute_num_layers=int(layers or 0),
        logits_chunks=int(chunks or 1),
        sequence_parallel=parallel == "1",
        use_distributed_optimizer=given.get("zero", "1") != "0",
        overlap=given.get("overlap", "1" if overlap else "0") != "0",
        use_tp_pp_dp_mapping=given.get(_MAPPING, str(int(use_tp_pp_dp_mapping))) != "0",
    )


def _filling(given: dict[str, int], world_size: int) -> str:
    """How sizes can fill so many GPUs, in words."""
    words = []
    for name, size in given.items():
        if world_size % size:
            some = [max(x for x in divisors(world_size) if x < size)]
            some += [x for x in divisors(world_size) if x > size][:1]
            flag = flag_of(_FLAGS_OF_SIZES[name])
            words.append(f"{name} ({flag}) {' or '.join(map(str, some))} in place of {size}")
    if words:
        return f"use {' and '.join(words)}"
    product = math.prod(given.values())
    if world_size % product == 0:
        return f"leave dp out, or use dp={world_size // product}"
    return f"use smaller ones: {' x '.join(given)} is {product} and has to divide {world_size}"


def add_model_flags(group: Any) -> None:
    group.add_argument(
        "--model", help="a name, for example gpt3-175b, or a Hugging Face config.json"
    )
    group.add_argument("--megatron-args", metavar="FLAGS", help="Megatron's flags in one text")
    words = "tokens of a sample (default: the context of a named model)"
    group.add_argument("--seq-length", type=int, help=words)
    words = "whose layers, with --model (default: te, less sure of its memory than if you say so)"
    group.add_argument("--implementation", choices=IMPLEMENTATIONS, help=words)
    words = "kernels of attention with --model; torch has a softmax in fp32 (default: flash)"
    group.add_argument("--attention", choices=list(ATTENTION), help=words)
    words = "kernels of norms with --model (default: fused, and torch with local and legacy layers)"
    group.add_argument("--norm", choices=NORMS, help=words)
    words = "of a gradient element as kept and reduced, with --model (default: 4)"
    group.add_argument("--gradient-bytes", type=int, choices=(2, 4), help=words)
    words = "optimizer state of a parameter, with --model (default: 12, and 8 in fp32)"
    group.add_argument("--optimizer-bytes", type=int, metavar="BYTES", help=words)


_LONG = 8192
"""Context above which pre-training mostly takes shorter samples."""


def length_from(args: argparse.Namespace) -> str:
    """What says how long a sample is: a flag, or `context` of the named model."""
    if args.seq_length is not None:
        return "--seq-length"
    return "--megatron-args" if args.megatron_args is not None else "context"


def length_line(args: argparse.Namespace, model: ModelSpec) -> str:
    """How long the samples of an answer are, and what says so."""
    source, tokens = length_from(args), model.seq_length
    if source == "--megatron-args" and getattr(args, "launched", None) is not None:
        source = "--from-command"
    if source != "context":
        return f"samples of {tokens} tokens ({source})"
    line = f"samples of {tokens} tokens, the context of {model.name}"
    if tokens > _LONG:
        line += f"; pre-training mostly takes shorter ones, for example --seq-length {_LONG // 2}"
    return line


def model_of(args: argparse.Namespace) -> Any:
    """The model asked for, implemented as flags say."""
    spec = _described_model(args)
    given = {n: x for n in _IMPLEMENTED if (x := getattr(args, n, None)) is not None}
    if given and args.megatron_args is not None:
        flags = ", ".join(map(flag_of, given))
        raise UsageProblem(f"{flags}: --megatron-args says it with Megatron's own flags; drop one")
    fields = {name: value for name, value in given.items() if name != "attention"}
    fields |= ATTENTION.get(given.get("attention", ""), {})
    if "implementation" in given:
        fields["implementation_given"] = True
    return dataclasses.replace(spec, **fields)


def _described_model(args: argparse.Namespace) -> Any:
    """The model of a name, a file or Megatron's flags."""
    if (args.model is None) == (args.megatron_args is None):
        ways = ["--model", "--megatron-args"]
        if getattr(args, "launched", None) is not None:
            ways = ["--model"]
        last = " and --from-command" if hasattr(args, "from_command") else ""
        words = ", ".join(ways) + last if last else " and ".join(ways)
        raise UsageProblem(f"give one of {words}")
    if args.megatron_args is not None:
        try:
            flags_of(args.megatron_args)
        except ValueError as error:
            raise UsageProblem(f"--megatron-args: {error}") from error
        given = parsed_flags(args.megatron_args)
        if given.bf16 and given.fp16:
            raise UsageProblem("--bf16 excludes --fp16; drop one")
        spec = dataclasses.replace(spec_of_arguments(given), **state_bytes(given))
    elif args.model in PRESETS:
        spec = PRESETS[args.model]
    elif args.model.endswith(".json"):
        try:
            return spec_of_config(Path(args.model), seq_length=args.seq_length)
        except (OSError, UnicodeDecodeError) as error:
            raise InputProblem(f"--model {args.model}: {reason_of(error)}") from error
        except SpecError as error:
            if "required" in str(error):
                raise UsageProblem(str(error)) from error
            raise InputProblem(str(error)) from error
        except (ValueError, TypeError) as error:
            raise InputProblem(f"--model {args.model} is not a config.json: {error}") from error
    else:
        known = unknown(args.model, list(PRESETS))
        raise UsageProblem(f"--model {args.model}: {known}, or a config.json")
    return spec if args.seq_length is None else spec.with_seq_length(args.seq_length)


def megatron_flag(args: argparse.Namespace, name: str) -> Any:
    """A field of `--megatron-args` that was given there, else None."""
    if args.megatron_args is None:
        return None
    found = parsed_flags(args.megatron_args)
    return getattr(found, name) if name in found.explicit_flags else None


def samples_of_flags(args: argparse.Namespace) -> float | None:
    """The length of the run in samples, where `--megatron-args` give it, else None."""
    if samples := megatron_flag(args, "train_samples"):
        return float(samples)
    steps, batch = megatron_flag(args, "train_iters"), batch_of_flags(args)
    return float(steps * batch) if steps and batch else None


def batch_of_flags(args: argparse.Namespace) -> int | None:
    """The global batch size of `--megatron-args`, else None."""
    batch = megatron_flag(args, "global_batch_size")
    return batch if isinstance(batch, int) else None


def uses_tp_pp_dp_mapping(args: argparse.Namespace) -> bool:
    """Whether ranks are numbered tensor, pipeline, data, by a flag of ours or of Megatron."""
    return args.use_tp_pp_dp_mapping or bool(megatron_flag(args, "use_tp_pp_dp_mapping"))


def cp_comm_types_of_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """The exchanges of keys and values to try, by a flag of ours or of Megatron; () without one.

    Raises:
        UsageProblem: one that is not known.
    """
    if args.cp_comm_type is not None:
        named = tuple(args.cp_comm_type.split(","))
    else:
        # Of an exchange of two levels the outer one is a ring.
        words = megatron_flag(args, "cp_comm_type") or ()
        named = tuple(dict.fromkeys("p2p" if x == "a2a+p2p" else x for x in words))
    if not set(named) <= set(CP_COMM_TYPES):
        raise UsageProblem(
            f"--cp-comm-type {','.join(named)}: use some of {', '.join(CP_COMM_TYPES)}"
        )
    return named


def logits_chunks_of(args: argparse.Namespace, model: ModelSpec) -> tuple[int, ...]:
    """Into how many parts the tokens of a rank may be cut for the logits, by a flag of ours or of
    Megatron; else a few powers of two.

    Raises:
        UsageProblem: no ascending numbers, or a model whose logits cannot be cut.
    """
    text = args.logits_chunks or str(megatron_flag(args, "logits_chunks") or "")
    if not text:
        return LOGITS_CHUNKS if not model.mtp_num_layers else (1,)
    parts = text.split(",")
    if not all(is_number(x) and int(x) for x in parts):
        raise UsageProblem(f"--logits-chunks {text}: write numbers, for example 1,2,4")
    found = tuple(sorted(set(map(int, parts))))
    if model.mtp_num_layers and found != (1,):
        raise UsageProblem(f"--logits-chunks {text} excludes --mtp-num-layers; drop one")
    return found


def cluster_of(args: argparse.Namespace) -> Any:
    """The cluster asked for; links that are given win over those of its description."""
    spec = _described_cluster(args)
    links = {"intra_bytes_per_s": args.intra, "nic_bytes_per_s": args.nic}
    given: dict[str, Any] = {
        name: with_unit(_LINKS[name], text) for name, text in links.items() if text is not None
    }
    if given and (spec.links is not None or spec.nodes):
        raise UsageProblem(
            "--nic and --intra go with equal links; change the links in the file of --cluster"
        )
    if args.nic is not None:
        # What a file says of its own network does not hold for another one.
        given["nic_is_measured"] = args.nic_is_measured
    elif args.nic_is_measured:
        raise UsageProblem("--nic-is-measured goes with --nic; give both")
    return dataclasses.replace(spec, **given)


def with_unit(flag: str, text: str) -> float:
    """A quantity of a flag, where a bare number is hardly meant in bytes."""
    try:
        value = quantity(text)
    except SpecError as error:
        raise UsageProblem(f"{flag}: {error}") from error
    if text.strip()[-1].isdigit():
        raise UsageProblem(f"{flag} {text} has no unit; write 400Gb/s (bits) or 50GB/s (bytes)")
    return value


def _described_cluster(args: argparse.Namespace) -> Any:
    named = {"--gpu": args.gpu, "--nodes": args.nodes, "--gpus-per-node": args.gpus_per_node}
    also = [flag for flag, value in named.items() if value is not None]
    if args.cluster is not None and also:
        fix = f"drop {', '.join(also)}{_by_nodes(args.cluster, args.gpus_per_node)}"
        raise UsageProblem(f"--cluster {args.cluster} names the machine; {fix}")
    if args.cluster is not None and args.cluster.endswith(".json"):
        return _cluster_of_file(Path(args.cluster))
    if args.cluster == "here":
        return here()
    if args.cluster is not None:
        try:
            return preset(args.cluster)
        except SpecError as error:
            how = _by_nodes(args.cluster, None) if "do not fill" in str(error) else ""
            raise SpecError(f"{error}{how}") from error
    if args.gpu is None or args.nodes is None:
        raise UsageProblem("give --cluster, or --nodes, --gpus-per-node and --gpu")
    per_node = GPUS_PER_NODE if args.gpus_per_node is None else args.gpus_per_node
    return of_gpu(args.gpu, nodes=args.nodes, gpus_per_node=per_node)


def _cluster_of_file(path: Path) -> ClusterSpec:
    try:
        found = ClusterSpec.load(path)
        _ = found.constants_file  # there is one of that name
    except (OSError, UnicodeDecodeError) as error:
        fix = "give the path of one, or KIND:GPUS such as a100-80g:8"
        raise InputProblem(f"--cluster {path}: {reason_of(error)}; {fix}") from error
    except SpecError as error:
        problem = str(error).removeprefix(f"{path.name}: ")
        raise InputProblem(f"--cluster {path}: {problem}") from error
    return found


def _by_nodes(cluster: str, gpus_per_node: int | None) -> str:
    """How to write KIND:GPUS with nodes of another size than usual; empty where it is not that."""
    kind, _, number = cluster.partition(":")
    if cluster.endswith(".json") or not is_number(number) or kind == "cpu":
        return ""
    try:
        usual = preset(f"{kind}:1")
    except SpecError:
        return ""
    gpus = int(number)
    per_node = gpus_per_node or next(n for n in (4, 2, 1) if gpus % n == 0)
    if per_node < 1 or gpus % per_node:
        return ""
    how = f"--gpu {usual.gpu.name} --nodes {gpus // per_node} --gpus-per-node {per_node}"
    return f", or write {how}"


def constants_of(args: argparse.Namespace, planner: Any) -> dict[str, Any]:
    """Where the constants come from, and what they are."""
    from copus_ext.cost_model.constants import describe

    file = args.constants or planner.cluster.constants_file
    return {**describe(file), "values": planner.constants.to_json()}
