"""Which chunk of a pipeline runs which layers: the flags that say so, and the text of one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.draft import Draft
from megatron.trainer.config.layout import Layout

FLAG = "--pipeline-model-parallel-layout"
_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_MAX_CHARACTERS = 100_000
_TOKEN = re.compile(r"\*\d{1,6}|[A-Za-z|()]")


def partition_of_text(text: str, *, num_layers: int, mtp_num_layers: int = 0) -> tuple[int, ...]:
    """Layers of every chunk from the value of `--pipeline-model-parallel-layout`.

    E is the embedding, t a layer, m a layer of `--mtp-num-layers`, L the head; | stands between
    chunks; `t*3` and `(tt|)*3` repeat; commas mean nothing.

    Args:
        mtp_num_layers: of the whole model; they stand in the last chunk.

    Raises:
        UsageError: one line that says what is wrong.
    """
    chunks = _expanded(text.replace(",", "").replace(" ", "")).split("|")
    whole = "".join(chunks)
    if unknown := sorted(set(whole) - set("EtmL")):
        raise UsageError(
            f"{FLAG} {text}: {' '.join(unknown)} is none of E (embedding), t (layer), m (layer of "
            "--mtp-num-layers), L (head)"
        )
    if whole.count("m") != mtp_num_layers or chunks[-1].count("m") != mtp_num_layers:
        raise UsageError(
            f"{FLAG} {text} has {whole.count('m')} m, {chunks[-1].count('m')} of them in the last "
            f"chunk; put as many there as --mtp-num-layers says, {mtp_num_layers}"
        )
    if whole != "E" + "t" * num_layers + "m" * mtp_num_layers + "L":
        raise UsageError(
            f"{FLAG} {text} must have E first, L last and --num-layers {num_layers} times t "
            f"between them; it has {whole.count('E')} E, {whole.count('t')} t, {whole.count('L')} L"
        )
    return tuple(chunk.count("t") for chunk in chunks)


def text_of_partition(counts: Sequence[int], mtp_num_layers: int = 0) -> str:
    """The value of `--pipeline-model-parallel-layout` for the layers of every chunk."""
    texts = []
    for n, run in itertools.groupby(counts[:-1]):
        times, one = len(list(run)), _letters(n) + "|"
        texts.append(f"({one})*{times}" if times > 2 else one * times)
    return "E" + "".join(texts) + _letters(counts[-1]) + "m" * mtp_num_layers + "L"


def partition_of_ends(
    *, num_layers: int, pp: int, vpp: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    """Layers of every chunk where those of the first and the last stage are given.

    Args:
        first: layers of the first stage, `--decoder-first-pipeline-num-layers`; None: as the rest.
        last: likewise, `--decoder-last-pipeline-num-layers`.

    Raises:
        UsageError: one line that says what is wrong.
    """
    flags = f"--decoder-first-pipeline-num-layers {first} --decoder-last-pipeline-num-layers {last}"
    if pp < 2:
        raise UsageError(f"{flags} needs --pipeline-model-parallel-size of at least 2")
    given = [n for n in (first, last) if n is not None]
    rest, stages = num_layers - sum(given), pp - len(given)
    if min(given) < 1 or rest < 0 or (rest > 0) != (stages > 0) or (stages and rest % stages):
        raise UsageError(
            f"{flags} leaves {rest} of --num-layers {num_layers} for {stages} other stages, which "
            "must be a multiple; change one of the two"
        )
    middle = rest // stages if stages else 0
    sizes = [middle] * pp
    sizes[0] = middle if first is None else first
    sizes[-1] = middle if last is None else last
    if broken := [n for n in sizes if n % vpp]:
        raise UsageError(
            f"{flags}: the {broken[0]} layers of a stage are not a multiple of {vpp} virtual "
            "stages; "
            f"give {FLAG} instead"
        )
    return tuple(n // vpp for n in sizes) * vpp


def partition_with_ends_counted(
    *, num_layers: int, pp: int, vpp: int, embedding: bool, loss: bool
) -> tuple[int, ...]:
    """Layers of every chunk where embedding or loss count as a layer,
    `--account-for-embedding-in-pipeline-split` and `--account-for-loss-in-pipeline-split`.

    Raises:
        UsageError: one line that says what is wrong.
    """
    entries = num_layers + embedding + loss
    if entries % (pp * vpp):
        raise UsageError(
            f"--num-layers {num_layers} and {embedding + loss} for embedding and loss "
            f"(--account-for-...-in-pipeline-split) are {entries}, no multiple of {pp} pipeline "
            f"ranks x {vpp} virtual stages; give {FLAG} instead"
        )
    sizes = [entries // (pp * vpp)] * (pp * vpp)
    sizes[0] -= embedding
    sizes[-1] -= loss
    return tuple(sizes)


def virtual_size(draft: Draft, pp: int) -> int:
    """Model chunks of every pipeline rank.

    Args:
        draft: with its flags as they were given.

    Raises:
        UsageError: flags that exclude each other, or layers that do not divide.
    """
    _exclude(draft)
    if draft["pipeline_model_parallel_layout"] is not None:
        return _chunks_of_text(draft, pp)
    layers, stages = (draft[name] for name in _VIRTUAL)
    if layers is None:
        return stages or 1
    counted = draft["num_layers"] + sum(draft[name] for name in _COUNTED)
    if pp < 1 or counted % (pp * layers) != 0:
        raise UsageError(
            f"--num-layers {draft['num_layers']} cannot be split over {pp} pipeline ranks with "
            f"chunks of --num-layers-per-virtual-pipeline-stage {layers}; choose a divisor of the "
            f"layers per rank"
        )
    return counted // (pp * layers)


def partition_of_flags(draft: Draft, layout: Layout) -> tuple[int, ...] | None:
    """Layers of every chunk; None where the flags leave them equal.

    Args:
        draft: with its flags as they were given.

    Raises:
        UsageError: a partition that does not fit this model.
    """
    shared = {"num_layers": draft["num_layers"], "pp": layout.pp, "vpp": layout.vpp}
    text = draft["pipeline_model_parallel_layout"]
    if text is not None:
        counts = _partition_of_draft(draft, text)
        if 0 in counts[1:-1]:
            raise UsageError(f"{FLAG} {text}: every chunk but the first and the last needs a t")
        return counts
    first, last = (draft[name] for name in _ENDS)
    if first is not None or last is not None:
        return partition_of_ends(**shared, first=first, last=last)
    embedding, loss = (draft[name] for name in _COUNTED)
    if embedding or loss:
        return partition_with_ends_counted(**shared, embedding=embedding, loss=loss)
    return None


def _chunks_of_text(draft: Draft, pp: int) -> int:
    text = draft["pipeline_model_parallel_layout"]
    chunks = len(_partition_of_draft(draft, text))
    if pp < 1 or chunks % pp != 0 or (pp == 1 and chunks > 1):
        raise UsageError(
            f"{FLAG} {text} has {chunks} chunks, no multiple of --pipeline-model-parallel-size "
            f"{pp}; change one of the two"
        )
    return chunks // pp


def _partition_of_draft(draft: Draft, text: str) -> tuple[int, ...]:
    further = draft["mtp_num_layers"] or 0
    return partition_of_text(text, num_layers=draft["num_layers"], mtp_num_layers=further)


def _exclude(draft: Draft) -> None:
    """Raises: of flags that say the same in two ways, two were given."""
    ways = [_VIRTUAL[:1], _VIRTUAL[1:]]
    if draft["pipeline_model_parallel_layout"] is not None:
        ways = [("pipeline_model_parallel_layout",), *ways, _ENDS, _COUNTED]
    elif any(draft[name] is not None for name in _ENDS):
        ways = [_ENDS, _VIRTUAL[:1], _COUNTED]
    given = [
        [f"--{name.replace('_', '-')}" for name in names if draft[name] not in (None, False)]
        for names in ways
    ]
    told = [names[0] for names in given if names]
    if len(told) > 1:
        raise UsageError(f"{' and '.join(told)} exclude each other; drop one")


def _letters(layers: int) -> str:
    return f"t*{layers}" if layers > 1 else "t" * layers


def _expanded(text: str) -> str:
    """Without brackets and repetitions."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        raise UsageError(f"{FLAG} {text}: use E, t, m, L, |, brackets and *N, as in Ett|(tt|)*2tL")
    open_parts: list[list[str]] = [[]]
    for token in tokens:
        if token == "(":
            open_parts.append([])
        elif token == ")" and len(open_parts) > 1:
            inner = "".join(open_parts.pop())
            open_parts[-1].append(inner)
        elif token[0] == "*" and open_parts[-1]:
            times, last = int(token[1:]), open_parts[-1].pop()
            if times * len(last) > _MAX_CHARACTERS:
                raise UsageError(f"{FLAG} {text} is too long")
            open_parts[-1].append(last * times)
        elif token in "*)" or token[0] == "*":
            raise UsageError(f"{FLAG} {text}: {token} has nothing before it")
        else:
            open_parts[-1].append(token)
    if len(open_parts) > 1:
        raise UsageError(f"{FLAG} {text}: a bracket is not closed")
    return "".join(open_parts[0])
