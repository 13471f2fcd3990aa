"""Flags of Megatron-LM that this trainer knows but does not implement.

Harmless ones are accepted and have no effect; the others would change the result and are refused
with a reason.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_MOE = (
    "mixture of experts is not supported yet; remove the --moe-* and --num-experts flags to train "
    "a dense model"
)
_CP = "context parallelism is not supported; remove the flag"
_FP8 = "8-bit and 4-bit matrix products are not supported; use --bf16"
_OFFLOAD = "offloading to the host is not supported; shard with --use-distributed-optimizer"
_FSDP = "FSDP is not supported; shard with --use-distributed-optimizer"
_OPTIM = "only plain Adam with one learning rate is supported; remove the flag"
_MODEL = "this trainer does not build such a model; remove the flag"
_TASK = "only pre-training of a decoder-only GPT is supported; remove the flag"
_STATE = "checkpoints are always torch_dist folders in --save; remove the flag"
_STRICT = "a checkpoint that is not exactly this model is always refused; remove the flag"
_GRAPHS = "CUDA graphs are not supported; remove the flag"
_OTHER = "it is not supported and would change the run; remove the flag"
_RESTART = "restarts are left to the launcher; remove the flag"
_FILE = "settings are given as flags only; write them on the command line"


@dataclass(frozen=True, kw_only=True)
class KnownFlag:
    """One flag that is understood and not implemented."""

    name: str
    """Option string."""
    nargs: int | str
    """Number of values as argparse counts them; 0 for a switch."""
    neutral: tuple[str, ...] = ()
    """Values that ask for nothing beyond the default, so that they are always accepted."""
    refusal: str | None = None
    """Why the flag is refused, and the fix; None if it is harmless."""

    def asks_for_something(self, values: list[str]) -> bool:
        """Tells whether these values differ from the neutral ones."""
        return not values or any(_plain(v) not in map(_plain, self.neutral) for v in values)


@functools.cache
def known_flags() -> Mapping[str, KnownFlag]:
    """Returns every known flag that is not implemented, by option string."""
    flags: dict[str, KnownFlag] = {}
    for nargs, text in _HARMLESS.items():
        for name in text.split():
            assert name not in flags, name
            flags[name] = KnownFlag(name=name, nargs=nargs)
    for names, nargs, neutral, reason in _REFUSED:
        for name in names.split():
            assert name not in flags, name
            flags[name] = KnownFlag(
                name=name, nargs=nargs, neutral=tuple(neutral.split()), refusal=reason
            )
    return MappingProxyType(flags)


def _plain(value: str) -> str:
    """Makes 1, 1.0 and 1e0 the same text."""
    try:
        return repr(float(value))
    except ValueError:
        return value.lower()


# Number of values -> option strings. Without effect here, or only beside a flag that is refused
# below.
_HARMLESS: dict[int | str, str] = {
    0: """
       --use-mcore-models --enable-experimental --no-one-logger --one-logger-async --log-straggler
       --disable-straggler-on-startup --log-energy --log-progress --record-memory-history
       --no-log-loss-scale-to-tensorboard --no-barrier-with-level-1-timing
       --run-workload-inspector-server --use-cpu-initialization --use-persistent-ckpt-worker
       --ckpt-fully-parallel-save --ckpt-fully-parallel-load --use-dist-ckpt
       --ckpt-assume-constant-structure --auto-detect-ckpt-format
       --no-use-tokenizer-model-from-checkpoint-args --dist-ckpt-save-pre-mcore-014 --disable-msc
       --legacy-tokenizer --test-mode --check-for-spiky-loss --check-for-large-grads
       --no-align-grad-reduce --no-align-param-gather --ddp-pad-buckets-for-high-nccl-busbw
       --no-gradient-reduce-div-fusion --no-async-tensor-model-parallel-allreduce
       --no-scatter-gather-tensors-in-pipeline --overlap-p2p-communication-warmup-flush
       --use-ring-exchange-p2p --use-sharp --disable-symmetric-registration
       --no-clone-scatter-output-in-embedding --te-rng-tracker --inference-rng-tracker
       --disable-tp-comm-split-ag --disable-tp-comm-split-rs --disable-tp-comm-overlap-ag
       --disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad --disable-tp-comm-bulk-dgrad
       --disable-tp-comm-bulk-wgrad --keep-fp8-transpose-cache --fsdp-double-buffer
       --no-strict-fsdp-dtensor-load --torch-fsdp2-no-reshard-after-forward
       --enable-full-sharding-in-hsdp --no-fp8-wgrad --fp8-param-gather --first-last-layers-bf16
       --reuse-grad-buf-for-mxfp8-param-ag --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads
       --no-pin-cpu-params --use-torch-optimizer-for-cpu-offload --muon-no-split-qkv
       --muon-use-nesterov --disable-mamba-mem-eff-path --use-fused-weighted-squared-relu
       --inprocess-empty-cuda-cache --replication --moe-grouped-gemm --moe-use-legacy-grouped-gemm
       --moe-router-fusion --moe-permute-fusion --moe-extended-tp --moe-layer-recompute
       --moe-pad-expert-input-to-capacity --moe-shared-expert-overlap --moe-per-layer-logging
       --moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-force-load-balancing
       --moe-router-padding-for-fp8 --moe-apply-probs-on-input --moe-enable-deepep
       --moe-use-upcycling --overlap-moe-expert-parallel-comm --delay-wgrad-compute
    """,
    1: """
       --local-rank --timing-log-level --timing-log-option --rerun-mode --error-injection-rate
       --error-injection-type --result-rejected-tracker-filename --one-logger-project
       --one-logger-run-name --app-tag-run-name --app-tag-run-version --straggler-ctrlr-port
       --straggler-minmax-count --memory-snapshot-path
       --check-weight-hash-across-dp-replicas-interval --config-logger-dir --train-sync-interval
       --num-dataset-builder-threads --mid-level-dataset-surplus --object-storage-cache-path
       --distributed-timeout-seconds-after-init --ddp-num-buckets --dist-ckpt-format
       --dump-param-to-param-group-map --sharp-enabled-group --suggested-communication-unit-size
       --adlr-autoresume-interval --wgrad-deferral-limit --tp-comm-overlap-cfg
       --tp-comm-bootstrap-backend --pipeline-model-parallel-comm-backend
       --non-persistent-local-ckpt-algo --replication-jump --replication-factor --fp8-recipe
       --fp8-margin --fp8-interval --fp8-amax-history-len --fp8-amax-compute-algo --fp4-recipe
       --num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16 --optimizer-offload-fraction
       --cuda-graph-warmup-steps --sgd-momentum --muon-momentum --muon-scale-mode
       --muon-fp32-matmul-prec --muon-num-ns-steps --muon-tp-mode --muon-extra-scale-factor
       --mtp-loss-scaling-factor --mamba-state-dim --mamba-head-dim --mamba-num-groups
       --mamba-num-heads --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim
       --v-head-dim --mscale --mscale-all-dim --moe-router-topk --moe-router-num-groups
       --moe-router-group-topk --moe-router-topk-scaling-factor --moe-router-score-function
       --moe-router-bias-update-rate --moe-router-dtype --moe-z-loss-coeff --moe-input-jitter-eps
       --moe-token-dispatcher-type --moe-ffn-hidden-size --moe-layer-freq
       --moe-shared-expert-intermediate-size --moe-expert-capacity-factor --moe-token-drop-policy
       --moe-upcycling-granularity --moe-deepep-num-sms
    """,
    "*": "--high-priority-stream-groups",
    "+": """
       --moe-router-load-balancing-type --moe-aux-loss-coeff --cp-comm-type
       --cuda-graph-scope
    """,
}

# Option strings, number of values, values that are always fine, why refused and the fix.
_REFUSED: tuple[tuple[str, int | str, str, str], ...] = (
    ("--num-experts", 1, "none", _MOE),
    ("--expert-model-parallel-size --expert-tensor-parallel-size", 1, "1", _MOE),
    ("--context-parallel-size", 1, "1", _CP),
    ("--dist-ckpt-strictness", 1, "assume_ok_unexpected raise_unexpected raise_all", _STRICT),
    ("--hierarchical-context-parallel-sizes", "+", "1", _CP),
    ("--hybrid-context-parallel", 0, "", _CP),
    ("--fp8-format --fp4-format", 1, "none", _FP8),
    ("--optimizer-cpu-offload --fine-grained-activation-offloading", 0, "", _OFFLOAD),
    ("--cpu-offloading-num-layers", 1, "0", _OFFLOAD),
    ("--use-megatron-fsdp --use-torch-fsdp2 --init-model-with-meta-device", 0, "", _FSDP),
    ("--data-parallel-sharding-strategy", 1, "no_shard", _FSDP),
    (
        "--num-distributed-optimizer-instances",
        1,
        "1",
        "one distributed optimizer spans all data-parallel ranks; set it to 1",
    ),
    ("--use-precision-aware-optimizer", 0, "", _OPTIM),
    (
        "--main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype",
        1,
        "fp32",
        _OPTIM,
    ),
    ("--decoupled-lr --decoupled-min-lr", 1, "none", _OPTIM),
    ("--overlap-param-gather-with-optimizer-step", 0, "", _OTHER),
    ("--ddp-reduce-scatter-with-fp32-accumulation", 0, "", _OTHER),
    (
        "--decrease-batch-size-if-needed",
        0,
        "",
        "rounding the batch loses samples; give a --global-batch-size that divides",
    ),
    (
        "--data-parallel-random-init",
        0,
        "",
        "all data-parallel ranks start from the same weights; remove the flag",
    ),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage",
        1,
        "",
        "the group size is always the pipeline size; remove the flag",
    ),
    ("--defer-embedding-wgrad-compute --use-nccl-ub", 0, "", _OTHER),
    ("--nccl-communicator-config-path --embedding-init-method-std", 1, "none", _OTHER),
    ("--tp-comm-overlap", 0, "", "it needs buffers of Transformer Engine; remove the flag"),
    ("--cuda-graph-impl", 1, "none", _GRAPHS),
    ("--enable-cuda-graph --external-cuda-graph", 0, "", _GRAPHS),
    (
        "--fake-process-group",
        0,
        "",
        "a run without communication trains nothing; remove the flag",
    ),
    ("--yaml-cfg --data-args-path --per-split-data-args-path", 1, "none", _FILE),
    ("--spec", "*", "", "the layers follow from --transformer-impl; remove the flag"),
    ("--inprocess-restart --enable-ft-package --calc-ft-timeouts", 0, "", _RESTART),
    ("--adlr-autoresume", 0, "", _RESTART),
    (
        "--reset-attention-mask",
        0,
        "",
        "attention is plainly causal; remove the flag, or mask the loss with --eod-mask-loss",
    ),
    ("--full-validation --multiple-validation-sets", 0, "", "use --eval-iters; remove the flag"),
    ("--sft --perform-rl-step --fim-data --vision-pretraining", 0, "", _TASK),
    ("--is-hybrid-model --bert-no-binary-head", 0, "", _TASK),
    ("--encoder-num-layers --decoder-num-layers", 1, "none", _TASK),
    ("--encoder-seq-length --decoder-seq-length", 1, "none", _TASK),
    (
        """
       --multi-latent-attention --apply-layernorm-1p --rotary-interleaved --qk-l2-norm --qk-clip
       --apply-residual-connection-post-layernorm --openai-gelu --quick-geglu --onnx-safe
       --fp32-residual-connection --init-method-xavier-uniform --use-legacy-models
       --use-te-activation-func --memory-efficient-layer-norm --attention-output-gate
        """,
        0,
        "",
        _MODEL,
    ),
    ("--mtp-num-layers --hybrid-attention-ratio --hybrid-mlp-ratio", 1, "0 none", _MODEL),
    ("--rotary-scaling-factor --rotary-seq-len-interpolation-factor", 1, "1 none", _MODEL),
    ("--rope-type", 1, "rope", _MODEL),
    ("--window-size --mrope-section", "+", "none", _MODEL),
    ("--window-attn-skip-freq --no-rope-freq --hybrid-override-pattern", 1, "none", _MODEL),
    ("--glu-linear-offset --activation-func-clamp-value", 1, "0 none", _MODEL),
    ("--softmax-type", 1, "vanilla", _MODEL),
    ("--vocab-extra-ids", 1, "0", _MODEL),
    ("--heterogeneous-layers-config-path", 1, "none", _MODEL),
    ("--heterogeneous-layers-config-encoded-json", 1, "none", _MODEL),
    ("--no-initialization --fp16-lm-cross-entropy", 0, "", _OTHER),
    ("--disable-bf16-reduced-precision-matmul --trust-remote-code", 0, "", _OTHER),
    ("--allow-ambiguous-pad-tokens", 0, "", _OTHER),
    ("--tokenizer-metadata", 1, "none", _OTHER),
    ("--distribute-saved-activations", 0, "", "use --sequence-parallel; remove the flag"),
    ("--checkpoint-activations", 0, "", "deprecated; use --recompute-granularity"),
    ("--batch-size", 1, "", "deprecated; use --micro-batch-size"),
    ("--warmup", 1, "", "deprecated; use --lr-warmup-fraction"),
    ("--model-parallel-size", 1, "", "deprecated; use --tensor-model-parallel-size"),
    ("--padded-vocab-size", 1, "none", "use --pad-vocab-for-tensor-parallel-size"),
    ("--ckpt-convert-format --ckpt-convert-save --non-persistent-ckpt-type", 1, "none", _STATE),
    ("--non-persistent-save-interval --non-persistent-global-ckpt-dir", 1, "none", _STATE),
    ("--non-persistent-local-ckpt-dir", 1, "none", _STATE),
    ("--ckpt-convert-update-legacy-dist-opt-format --load-main-params-from-ckpt", 0, "", _STATE),
    (
        "--use-mp-args-from-checkpoint-args",
        0,
        "",
        "any layout loads any checkpoint; give the layout you want as flags",
    ),
    (
        "--pretrained-checkpoint",
        1,
        "none",
        "use --load with --finetune to start from other weights",
    ),
)

# Beginning of an option string -> why all its unlisted members are refused.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "--moe-": _MOE,
        "--fp8-": _FP8,
        "--fp4-": _FP8,
        "--rl-": _TASK,
        "--grpo-": _TASK,
        "--langrl-": _TASK,
        "--retro-": _TASK,
        "--sft-": _TASK,
        "--dino-": _TASK,
        "--vision-": _TASK,
        "--biencoder-": _TASK,
        "--inference-": _TASK,
        "--inprocess-": _RESTART,
        "--mamba-": _MODEL,
        "--muon-": _OPTIM,
    }
)
