"""Flags of Megatron-LM that this trainer knows but does not implement.

Harmless ones are accepted: what only costs time or memory, or checks less strictly, runs without
the flag, and a note says so. The others would change the result and are refused with a reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_MOE = (
    "mixture of experts is not supported yet; remove the --moe-* and --num-experts flags to train "
    "a dense model"
)
_CP = "context parallelism is not supported yet; remove the flag, or use --sequence-parallel"
_FP4 = "4-bit matrix products are not supported; use --fp8-format or --bf16"
_FP8 = "such 8-bit matrix products are not supported; use --fp8-format and --fp8-recipe alone"
_OFFLOAD = "the optimizer stays on the GPU; shard it with --use-distributed-optimizer"
# The distributed optimizer trains the same model, but it shares out only the optimizer's state: a
# job that FSDP just fits would run out of memory minutes later. One line at the start is kinder.
_FSDP = "FSDP is not supported; shard with --use-distributed-optimizer"
_OPTIM = "only plain Adam is supported; remove the flag"
_MODEL = "this trainer does not build such a model; remove the flag"
_WINDOW = "attention is causal over the whole sequence; remove the flag"
_TASK = "only pre-training of a decoder-only GPT is supported; remove the flag"
_STATE = "checkpoints are always torch_dist folders in --save; remove the flag"
_ONE_KIND = "all checkpoints go to --save; remove the flag, and lower --save-interval"
_OTHER = "it is not supported and would change the run; remove the flag"
_RESTART = "restarts are left to the supervisor; remove the flag"
_EXPORT = "quantisation and distillation by ModelOpt are not supported; remove the flag"
_FILE = "settings are given as flags only; write them on the command line"


@dataclass(frozen=True, kw_only=True)
class KnownFlag:
    """One flag that is understood and not implemented."""

    name: str
    """Option string."""
    nargs: int | str
    """Number of values as argparse counts them; 0 for a switch."""
    neutral: tuple[str, ...] = ()
    """Values that ask for nothing beyond the default, so that they are accepted without a note."""
    choices: tuple[str, ...] | None = None
    """The values that exist, or None for any."""
    instead: str | None = None
    """What happens in place of a harmless flag; None if it has no effect that a user would miss."""
    refusal: str | None = None
    """Why the flag is refused, and the fix; None if it is harmless."""

    def asks_for_something(self, values: list[str]) -> bool:
        """Tells whether these values differ from the neutral ones."""
        return not values or any(_plain(v) not in map(_plain, self.neutral) for v in values)


@functools.cache
def known_flags() -> Mapping[str, KnownFlag]:
    """Returns every known flag that is not implemented, by option string."""
    flags: dict[str, KnownFlag] = {}

    def add(
        names: str,
        nargs: int | str,
        *,
        neutral: str = "",
        instead: str | None = None,
        refusal: str | None = None,
    ) -> None:
        for name in names.split():
            assert name not in flags, name
            flags[name] = KnownFlag(
                name=name,
                nargs=nargs,
                neutral=tuple(neutral.split()),
                choices=_CHOICES.get(name),
                instead=instead,
                refusal=refusal,
            )

    for nargs, names in _HARMLESS.items():
        add(names, nargs)
    for instead, lines in _REPLACED.items():
        for words in map(str.split, lines.strip().splitlines()):
            nargs = int(words[1]) if words[1].isdigit() else words[1]
            add(words[0], nargs, neutral=" ".join(words[2:]), instead=instead)
    for name, use in DEPRECATED.items():
        add(name, 0 if name == "--checkpoint-activations" else 1, refusal=f"deprecated; use {use}")
    for names, nargs, neutral, refusal in _REFUSED:
        add(names, nargs, neutral=neutral, refusal=refusal)
    return MappingProxyType(flags)


def notes_of(names: Iterable[str]) -> list[str]:
    """What happens in place of the harmless flags of a command line, a line for each reason.

    Args:
        names: option strings of `known_flags`.
    """
    by_reason: dict[str | None, list[str]] = {}
    for name in names:
        by_reason.setdefault(known_flags()[name].instead, []).append(name)
    plain = by_reason.pop(None, [])
    lines = [f"accepted without effect: {', '.join(plain)}"] if plain else []
    return lines + [f"{', '.join(same)}: {reason}" for reason, same in by_reason.items()]


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
       --use-mcore-models --enable-experimental --no-one-logger --one-logger-async
       --no-log-loss-scale-to-tensorboard --no-barrier-with-level-1-timing
       --run-workload-inspector-server --use-cpu-initialization --use-persistent-ckpt-worker
       --ckpt-fully-parallel-save --ckpt-fully-parallel-load --use-dist-ckpt
       --ckpt-assume-constant-structure --auto-detect-ckpt-format
       --no-use-tokenizer-model-from-checkpoint-args --dist-ckpt-save-pre-mcore-014 --disable-msc
       --legacy-tokenizer --test-mode --no-align-grad-reduce --no-align-param-gather
       --ddp-pad-buckets-for-high-nccl-busbw --no-gradient-reduce-div-fusion
       --no-async-tensor-model-parallel-allreduce --no-scatter-gather-tensors-in-pipeline
       --overlap-p2p-communication-warmup-flush --use-ring-exchange-p2p
       --no-clone-scatter-output-in-embedding --te-rng-tracker --inference-rng-tracker
       --keep-fp8-transpose-cache --fsdp-double-buffer --no-strict-fsdp-dtensor-load
       --torch-fsdp2-no-reshard-after-forward --enable-full-sharding-in-hsdp
       --reuse-grad-buf-for-mxfp8-param-ag --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads
       --no-pin-cpu-params --use-torch-optimizer-for-cpu-offload --muon-no-split-qkv
       --muon-use-nesterov --disable-mamba-mem-eff-path --use-fused-weighted-squared-relu
       --replication --moe-grouped-gemm --moe-use-legacy-grouped-gemm --moe-router-fusion
       --moe-permute-fusion --moe-extended-tp --moe-layer-recompute
       --moe-pad-expert-input-to-capacity --moe-shared-expert-overlap --moe-per-layer-logging
       --moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-force-load-balancing
       --moe-router-padding-for-fp8 --moe-apply-probs-on-input --moe-enable-deepep
       --moe-use-upcycling --overlap-moe-expert-parallel-comm --delay-wgrad-compute
       --disable-async-tensor-model-parallel-allreduce --no-tp-comm-bulk-wgrad
       --no-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs --no-tp-comm-split-ag
       --no-tp-comm-split-rs --disable-tp-comm-split-ag --disable-tp-comm-split-rs
       --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad
       --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad
       --disable-clone-scatter-output-in-embedding --disable-jit-fuser
       --exit-signal-handler-for-dataloader --disable-log-loss-scale-to-tensorboard
       --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap
       --disable-use-tokenizer-model-from-checkpoint-args --disable-strict-fsdp-dtensor-load
       --fsdp-manual-registration --tokenizer-hf-use-fast --tokenizer-hf-include-special-tokens
       --tokenizer-sentencepiece-legacy --ep-overlap-early-attn-memory-release --mtp-standalone
       --dsa-indexer-use-sparse-loss --moe-shared-expert-gate --moe-enable-routing-replay
       --moe-router-padding-for-quantization --moe-pad-experts-for-cuda-graph-inference
       --flash-decode --cache-mla-latents --decode-only-cuda-graphs --nccl-all-reduce-for-prefill
       --enable-chunked-prefill --disable-chunked-prefill --use-legacy-static-engine
       --inference-fuse-tp-communication --inference-dynamic-batching
       --inference-dynamic-batching-track-paused-request-events --inference-wandb-logging
       --no-inference-wandb-logging --output-bert-embeddings --use-one-sent-docs
       --retriever-score-scaling --fp4-param-gather --biencoder-shared-query-context-model
    """,
    1: """
       --local-rank --timing-log-level --timing-log-option --one-logger-project
       --one-logger-run-name --app-tag-run-name --app-tag-run-version --config-logger-dir
       --train-sync-interval --num-dataset-builder-threads --object-storage-cache-path
       --distributed-timeout-seconds-after-init --ddp-num-buckets --dist-ckpt-format
       --dump-param-to-param-group-map --suggested-communication-unit-size
       --non-persistent-local-ckpt-algo --replication-jump --replication-factor --fp8-interval
       --fp4-recipe --optimizer-offload-fraction --sgd-momentum --muon-momentum --muon-scale-mode
       --muon-fp32-matmul-prec --muon-num-ns-steps --muon-tp-mode --muon-extra-scale-factor
       --mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads
       --moe-router-topk --moe-router-num-groups
       --moe-router-group-topk --moe-router-topk-scaling-factor --moe-router-score-function
       --moe-router-bias-update-rate --moe-router-dtype --moe-z-loss-coeff --moe-input-jitter-eps
       --moe-token-dispatcher-type --moe-ffn-hidden-size --moe-layer-freq
       --moe-shared-expert-intermediate-size --moe-expert-capacity-factor --moe-token-drop-policy
       --moe-upcycling-granularity --moe-deepep-num-sms --max-seqlen-per-dp-cp-rank --qk-clip-alpha
       --qk-clip-threshold --dsa-indexer-n-heads --dsa-indexer-head-dim --dsa-indexer-topk
       --dsa-indexer-loss-coeff --linear-attention-freq --linear-conv-kernel-dim
       --linear-key-head-dim --linear-value-head-dim --linear-num-key-heads --linear-num-value-heads
       --kitchen-attention-backend --fp4-quantizer-factory --moe-flex-dispatcher-backend
       --moe-latent-size --moe-hybridep-num-sms --relative-attention-num-buckets
       --relative-attention-max-distance --per-dataset-sequences-path --lazy-mpu-init
       --mlp-chunks-for-prefill --max-tokens-to-oom --bert-embedder-type
       --inference-batch-times-seqlen-threshold --inference-max-requests --inference-max-seq-length
       --inference-max-batch-size --inference-dynamic-batching-buffer-size-gb
       --inference-dynamic-batching-paused-buffer-size-gb --inference-dynamic-batching-block-size
       --inference-dynamic-batching-max-requests --inference-dynamic-batching-max-tokens
       --inference-dynamic-batching-num-cuda-graphs
       --inference-dynamic-batching-unified-memory-level
       --inference-dynamic-batching-cuda-graph-max-tokens
       --inference-dynamic-batching-cuda-graph-mixed-prefill-count --inference-logging-step-interval
       --inference-coordinator-port --fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate
       --fim-no-prefix --fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token
       --fim-eod-token --sample-rate --mask-prob --short-seq-prob --ict-head-size --ict-load
       --bert-load --titles-data-path --query-in-block-prob --evidence-data-path --block-data-path
       --embedding-path --indexer-batch-size --indexer-log-interval --num-classes --img-h --img-w
       --num-channels --patch-dim --classes-fraction --data-per-class-fraction --head-lr-mult
       --swin-backbone-type --mask-type --mask-factor --iter-per-epoch --biencoder-projection-dim
       --refit-method
    """,
    "+": """
       --moe-router-load-balancing-type --moe-aux-loss-coeff --cp-comm-type
       --retriever-report-topk-accuracies
    """,
}

# What happens in their place -> lines of option string, number of values, and values that ask for
# nothing.
_REPLACED: dict[str, str] = {
    "a checkpoint that is not exactly this model is refused in any case": """
        --dist-ckpt-strictness 1 assume_ok_unexpected raise_unexpected raise_all
    """,
    "the layout is that of the flags, and any layout loads any checkpoint": """
        --use-mp-args-from-checkpoint-args 0
    """,
    "initial weights are drawn, even where a checkpoint follows": "--no-initialization 0",
    "the run uses no CUDA graphs": """
        --cuda-graph-impl 1 none
        --cuda-graph-scope +
        --cuda-graph-warmup-steps 1
        --enable-cuda-graph 0
        --external-cuda-graph 0
    """,
    "messages of tensor parallelism do not overlap with computation": """
        --tp-comm-overlap 0
        --tp-comm-overlap-cfg 1
        --tp-comm-bootstrap-backend 1
    """,
    "weights are gathered after the optimizer step, not during it": """
        --overlap-param-gather-with-optimizer-step 0
    """,
    "the output layer computes its weight gradient in the backward pass": """
        --defer-embedding-wgrad-compute 0
        --wgrad-deferral-limit 1
    """,
    "NCCL keeps its own buffers and settings": """
        --use-nccl-ub 0
        --use-sharp 0
        --disable-symmetric-registration 0
        --create-all-gather-group 0
        --nccl-communicator-config-path 1 none
        --sharp-enabled-group 1
        --symmetric-ar-type 1
        --pipeline-model-parallel-comm-backend 1
        --high-priority-stream-groups *
    """,
    "activations stay on the GPU, which takes more memory; --recompute-granularity saves it": """
        --fine-grained-activation-offloading 0
        --offload-modules +
        --min-offloaded-tensor-size 1
        --cpu-offloading-num-layers 1 0
    """,
    "saved activations are not shared out, which takes more memory; --sequence-parallel does": """
        --distribute-saved-activations 0
    """,
    "the optimizer keeps gradients, master weights and moments in fp32": """
        --use-precision-aware-optimizer 0
    """,
    "the supervisor (docs/user-guide.md) starts a run again whose ranks fail": """
        --inprocess-restart 0
        --inprocess-empty-cuda-cache 0
        --inprocess-max-iterations 1
        --inprocess-monitor-thread-interval 1
        --inprocess-monitor-process-interval 1
        --inprocess-progress-watchdog-interval 1
        --inprocess-heartbeat-interval 1
        --inprocess-heartbeat-timeout 1
        --inprocess-soft-timeout 1
        --inprocess-hard-timeout 1
        --inprocess-barrier-timeout 1
        --inprocess-completion-timeout 1
        --inprocess-last-call-wait 1
        --inprocess-termination-grace-time 1
        --inprocess-granularity 1
        --inprocess-active-world-size 1
        --enable-ft-package 0
        --calc-ft-timeouts 0
        --ft-num-warmup-iters 1
        --adlr-autoresume 0
        --adlr-autoresume-interval 1
    """,
    "no step is run again to check what it computed": "--rerun-mode 1 disabled",
    "no errors are injected": """
        --error-injection-rate 1 0
        --error-injection-type 1
    """,
    "only a loss or gradient that is not finite counts as bad, and skips its step": """
        --check-for-spiky-loss 0
        --check-for-large-grads 0
    """,
    "the weights of replicas are not compared": """
        --check-weight-hash-across-dp-replicas-interval 1 none
    """,
    "slow ranks are looked for every 100 steps in any case": """
        --log-straggler 0
        --disable-straggler-on-startup 0
        --straggler-ctrlr-port 1
        --straggler-minmax-count 1
    """,
    "this record is not written": """
        --log-energy 0
        --log-progress 0
        --log-max-attention-logit 0
        --log-device-memory-used 0
        --log-memory-interval 1 none
        --record-memory-history 0
        --memory-snapshot-path 1
        --save-wgrads-interval 1 none
        --save-dgrads-interval 1 none
        --result-rejected-tracker-filename 1 none
    """,
}

# Option strings, number of values, values that are always fine, why refused and the fix.
_REFUSED: tuple[tuple[str, int | str, str, str], ...] = (
    ("--num-experts", 1, "none", _MOE),
    ("--expert-model-parallel-size --expert-tensor-parallel-size", 1, "1", _MOE),
    ("--context-parallel-size", 1, "1", _CP),
    ("--hierarchical-context-parallel-sizes", "+", "1", _CP),
    ("--hybrid-context-parallel", 0, "", _CP),
    ("--fp4-format", 1, "none", _FP4),
    ("--fp8-quantizer-factory --te-precision-config-file", 1, "none", _FP8),
    ("--use-kitchen-attention", 0, "", _FP8),
    ("--optimizer-cpu-offload", 0, "", _OFFLOAD),
    ("--use-megatron-fsdp --use-torch-fsdp2 --init-model-with-meta-device", 0, "", _FSDP),
    ("--data-parallel-sharding-strategy --outer-dp-sharding-strategy", 1, "no_shard", _FSDP),
    (
        "--main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype",
        1,
        "fp32",
        "the optimizer keeps its state in fp32; remove the flag",
    ),
    (
        "--no-weight-decay-cond-type",
        1,
        "none",
        "an older spelling; use --apply-wd-to-qk-layernorm",
    ),
    (
        "--ddp-reduce-scatter-with-fp32-accumulation",
        0,
        "",
        "gradients are added up in the format they are sent in; use fp32 for both: "
        "--accumulate-allreduce-grads-in-fp32",
    ),
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
        "--fake-process-group",
        0,
        "",
        "a run without communication trains nothing; remove the flag",
    ),
    ("--yaml-cfg --data-args-path --per-split-data-args-path", 1, "none", _FILE),
    ("--spec", "*", "", "the layers follow from --transformer-impl; remove the flag"),
    (
        "--reset-attention-mask",
        0,
        "",
        "attention is plainly causal; remove the flag, or mask the loss with --eod-mask-loss",
    ),
    ("--full-validation --multiple-validation-sets", 0, "", "use --eval-iters; remove the flag"),
    (
        "--fim-data",
        0,
        "",
        "samples are never rearranged to fill in the middle; remove the flag, or write such "
        "samples into the data set",
    ),
    ("--sft --perform-rl-step --vision-pretraining", 0, "", _TASK),
    ("--is-hybrid-model --bert-no-binary-head", 0, "", _TASK),
    ("--encoder-num-layers --decoder-num-layers", 1, "none", _TASK),
    ("--encoder-seq-length --decoder-seq-length", 1, "none", _TASK),
    (
        """
       --qk-clip --openai-gelu --use-legacy-models --use-te-activation-func
       --memory-efficient-layer-norm --attention-output-gate
        """,
        0,
        "",
        _MODEL,
    ),
    (
        "--apply-residual-connection-post-layernorm",
        0,
        "",
        "megatron-core 0.16.1 takes it and does nothing with it; remove the flag",
    ),
    (
        "--fp32-residual-connection",
        0,
        "",
        "megatron-core 0.16.1 makes the residual stream half precision again at the first sum; "
        "remove the flag",
    ),
    ("--hybrid-attention-ratio --hybrid-mlp-ratio", 1, "0 none", _MODEL),
    ("--window-size --window-attn-skip-freq", 1, "none", _WINDOW),
    ("--mrope-section", "+", "none", _MODEL),
    ("--onnx-safe --hybrid-override-pattern", 1, "none", _MODEL),
    ("--vocab-extra-ids", 1, "0", _MODEL),
    ("--heterogeneous-layers-config-path", 1, "none", _MODEL),
    ("--heterogeneous-layers-config-encoded-json", 1, "none", _MODEL),
    ("--experimental-attention-variant", 1, "none", _MODEL),
    ("--fp16-lm-cross-entropy --batch-invariant-mode", 0, "", _OTHER),
    ("--disable-bf16-reduced-precision-matmul", 0, "", _OTHER),
    (
        "--trust-remote-code",
        0,
        "",
        "no code that comes with a tokenizer is run; use a tokenizer without",
    ),
    (
        "--mid-level-dataset-surplus",
        1,
        "0.005",
        "it changes which samples a blend draws; remove the flag",
    ),
    (
        "--phase-transition-iterations",
        1,
        "none",
        "one run has one data set; remove the flag, and start the next phase with --load and "
        "--allow-changed-data",
    ),
    (
        "--tokenizer-special-tokens",
        "+",
        "",
        "they would change the vocabulary; use a tokenizer that has them",
    ),
    ("--allow-ambiguous-pad-tokens", 0, "", _OTHER),
    ("--tokenizer-metadata", 1, "none", _OTHER),
    ("--ckpt-convert-format --ckpt-convert-save", 1, "none", _STATE),
    ("--non-persistent-ckpt-type --non-persistent-save-interval", 1, "none", _ONE_KIND),
    ("--non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir", 1, "none", _ONE_KIND),
    ("--ckpt-convert-update-legacy-dist-opt-format --load-main-params-from-ckpt", 0, "", _STATE),
    (
        "--pretrained-checkpoint",
        1,
        "none",
        "use --load with --finetune to start from other weights",
    ),
)

DEPRECATED: Mapping[str, str] = MappingProxyType(
    {
        "--batch-size": "--micro-batch-size",
        "--checkpoint-activations": "--recompute-granularity",
        "--model-parallel-size": "--tensor-model-parallel-size",
        "--warmup": "--lr-warmup-fraction",
    }
)
"""Flags that Megatron-LM itself refuses -> what came in their place."""

# Beginning of an option string -> why all its unlisted members are refused.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "--moe-": _MOE,
        "--fp8-": _FP8,
        "--fp4-": _FP4,
        "--export-": _EXPORT,
        "--rl-": _TASK,
        "--no-rl-": _TASK,
        "--grpo-": _TASK,
        "--langrl-": _TASK,
        "--no-langrl-": _TASK,
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

# The values of flags above that exist, where Megatron-LM names them.
_CHOICES: Mapping[str, tuple[str, ...]] = {
    name: tuple(values.split())
    for name, values in {
        "--cuda-graph-impl": "none local transformer_engine",
        "--data-parallel-sharding-strategy": "no_shard optim optim_grads optim_grads_params",
        "--dist-ckpt-strictness": """
            assume_ok_unexpected log_unexpected log_all raise_unexpected raise_all
            return_unexpected return_all ignore_all
        """,
        "--error-injection-type": "correct_result transient_error persistent_error",
        "--pipeline-model-parallel-comm-backend": "nccl ucc",
        "--rerun-mode": "disabled validate_results report_stats",
        "--sharp-enabled-group": "dp dp_replica",
        "--symmetric-ar-type": "two_shot one_shot multimem_all_reduce",
        "--timing-log-level": "0 1 2",
        "--timing-log-option": "max minmax all",
        "--tp-comm-bootstrap-backend": "nccl mpi gloo",
    }.items()
}
