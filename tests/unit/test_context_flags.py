"""Ranks that share samples: what Transformer Engine can do for them, and what stands instead."""

from __future__ import annotations

import re

import pytest

from tests.unit.test_derive import GPU, LATENT, config_of, refusal

SHARED = "--num-attention-heads 8 --context-parallel-size 4 --bf16 --position-embedding-type rope"
LEVELS = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes"
FOUR_GROUPS = "--group-query-attention --num-query-groups 4"
TWO_GROUPS = "--group-query-attention --num-query-groups 2"


@pytest.mark.parametrize(
    ("flags", "parts", "instead"),
    [
        (
            f"--cp-comm-type a2a {TWO_GROUPS}",
            "--cp-comm-type a2a .* 2 query groups .* 4 ranks; give --cp-comm-type p2p",
            "--cp-comm-type p2p",
        ),
        (
            f"--cp-comm-type a2a {FOUR_GROUPS} --tensor-model-parallel-size 2",
            "--cp-comm-type a2a .* 2 query groups .* 4 ranks",
            "--tensor-model-parallel-size 1",
        ),
        (
            f"{LEVELS} 4 1 {TWO_GROUPS}",
            r"--cp-comm-type a2a\+p2p .* 2 query groups .* 4 ranks",
            "--hierarchical-context-parallel-sizes 2 2",
        ),
        (f"{LEVELS} 4", "-sizes; give two sizes", f"{LEVELS} 4 1"),
        (f"{LEVELS} 2 2 1", "-sizes; give two sizes", f"{LEVELS} 2 2"),
        (
            "--attention-backend unfused",
            "-backend unfused .*; use auto",
            "--attention-backend auto",
        ),
        ("--attention-backend local", "-backend local .*; use auto", "--attention-backend fused"),
        ("--softmax-type off-by-one", "off-by-one .* p2p; give a2a", "--cp-comm-type a2a"),
        (
            f"{LATENT} --cp-comm-type a2a",
            "--multi-latent-attention .*; give p2p",
            "--cp-comm-type p2p",
        ),
    ],
)
def test_what_transformer_engine_cannot_share(flags: str, parts: str, instead: str) -> None:
    message = refusal(f"{SHARED} {flags}", 8, **GPU)
    assert re.search(parts, message) and "\n" not in message, message
    assert config_of(f"{SHARED} {flags} {instead}", 8, **GPU).layout.cp == 4


def test_without_transformer_engine_groups_are_repeated() -> None:
    config = config_of(f"{SHARED} --cp-comm-type a2a {TWO_GROUPS}", 8, cuda_available=True)
    assert config.kernels.transformer_impl == "local"
    backend = config_of(f"{SHARED} --attention-backend unfused", 8)
    assert backend.layout.cp == 4


@pytest.mark.parametrize(
    "flags",
    [
        "",
        TWO_GROUPS,
        f"--cp-comm-type a2a {FOUR_GROUPS}",
        f"{LEVELS} 2 2 {TWO_GROUPS}",
        "--attention-backend fused",
        "--attention-backend unfused --use-flash-attn",
        "--softmax-type off-by-one --cp-comm-type a2a",
        LATENT,
    ],
)
def test_what_transformer_engine_can_share(flags: str) -> None:
    assert config_of(f"{SHARED} {flags}", 8, **GPU).layout.cp == 4


def test_transformer_engine_shares_no_fp32_samples() -> None:
    flags = SHARED.replace("--bf16", "")
    assert "fp32" in refusal(flags, 8, **GPU) and "--bf16" in refusal(flags, 8, **GPU)
    for more in ("--fp16", "--transformer-impl local"):
        config_of(f"{flags} {more}", 8, **GPU)
