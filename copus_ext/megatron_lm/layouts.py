"""A job of a Megatron-LM checkout as a change of layout sees it."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from copus_ext.megatron_lm.move_memory import check_memory
from copus_ext.megatron_lm.recorded import Recorded
from copus_ext.reshard.plan import ReshardPlan
from megatron.trainer.common.step_settings import StepSettings
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import batch_problems, layout_problems

_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("pipeline_model_parallel_layout", None, "--pipeline-model-parallel-layout"),
    ("decoder_first_pipeline_num_layers", None, "--decoder-first-pipeline-num-layers"),
    ("decoder_last_pipeline_num_layers", None, "--decoder-last-pipeline-num-layers"),
    ("account_for_embedding_in_pipeline_split", False, "the embedding among the layers"),
    ("account_for_loss_in_pipeline_split", False, "the loss among the layers"),
    ("fp8", None, "fp8, whose history of scales stays on its rank"),
    ("fp4", None, "fp4"),
    ("cuda_graph_impl", "none", "CUDA graphs"),
    ("optimizer_cpu_offload", False, "--optimizer-cpu-offload"),
    ("use_precision_aware_optimizer", False, "--use-precision-aware-optimizer"),
    ("full_validation", False, "--full-validation"),
    ("perform_rl_step", False, "--perform-rl-step"),
    ("gtp_weight_remat_size", 1, "--generalized-tensor-parallel-remat-size"),
)
"""Arguments with the value that they need where layouts change, and what else they stand for."""


def blocks_layouts(args: Any) -> list[str]:
    """Lists what of a checkout's arguments keeps the layout as it is; empty if nothing does."""
    found = [
        what
        for name, plain, what in _FIXED
        if getattr(args, name, plain) not in (plain, None, False)
    ]
    is_layer_wise = getattr(args, "use_layer_wise_distributed_optimizer", False)
    if is_layer_wise or getattr(args, "optimizer", "adam") == "dist_muon":
        found.append("--use-distributed-optimizer with Muon")
    return found


@dataclass
class Chunks:
    """This rank's chunks of a model, wrapped as the checkout wraps them."""

    chunks: list[Any]

    def detach_hooks(self) -> None:
        """Lets go of them, and cuts what would keep them alive: rings through autograd's own
        objects, which no collection sees (docs/decisions/001)."""
        for chunk in self.chunks:
            if getattr(chunk, "grad_accs", None) is not None:
                chunk.grad_accs.clear()
            _drop_graphs(chunk)
        self.chunks = []


class CheckoutHost:
    """See `LayoutHost`. A target is what our controller is given as a configuration.

    Args:
        context: of the controller; its model, optimizer, groups and configuration follow a change.
            The list of chunks and the optimizer in it are those that `pretrain` goes on with.
        config_of: makes a configuration of arguments.
        events: called with `released` before a layout goes, and with `installed` once one is there.
    """

    def __init__(
        self,
        recorded: Recorded,
        args: Any,
        context: Any,
        *,
        config_of: Callable[[Any], Any],
        events: Callable[[str], None],
    ) -> None:
        self._recorded, self._args, self._context = recorded, args, context
        self._config_of, self._events = config_of, events
        self._model: list[Any] = context.model
        self._optimizer, self._scheduler = context.optimizer, context.scheduler
        # Its own parser takes the flag back where the tensor size is 1.
        self.wants_sequence_parallel = bool(
            args.sequence_parallel or "--sequence-parallel" in sys.argv
        )
        self.is_released = False
        self._own_values: dict[str, Any] = {}
        context.config = self._configured(args)

    @property
    def layout(self) -> Layout:
        return self._context.config.layout

    @property
    def state(self) -> Any:
        return self._context.state

    @property
    def present(self) -> tuple[Any, Any, Any, Any]:
        c = self._context
        return c.config, Chunks(list(self._model)), self._optimizer, c.groups

    def span(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish_saving(self) -> None:
        """The end of a segment has waited for it."""

    def target(self, layout: Layout) -> Any:
        problems = self.problems(layout)
        if problems:
            raise ValueError("\n".join(problems))
        return self._configured(self._arguments_of(layout))

    def _configured(self, args: Any) -> Any:
        """What the controller is given as a configuration, which knows what layouts may be."""
        config = self._config_of(args)
        config.layout_problems = self.problems
        config.wants_sequence_parallel = self.wants_sequence_parallel
        return config

    def problems(self, layout: Layout) -> list[str]:
        """Lists why the run cannot have a layout."""
        args, here = self._args, self.layout
        if layout.world_size != here.world_size or layout.cp != here.cp:
            return [f"{layout} is for other ranks or another context parallel size"]
        parallel = self.wants_sequence_parallel and layout.tp > 1
        flat = self._config_of(self._arguments_of(layout)).flat()
        problems = layout_problems(
            layout, flat, seq_length=args.seq_length, sequence_parallel=parallel
        )
        if self._recorded.has_own_groups:
            problems.append("the script gives process groups of its own to pretrain")
        if layout.vpp > 1 and not self._recorded.takes_virtual_stages:
            problems.append("the script's provider of data takes no vp_stage")
        evaluated = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
        micro = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
        return problems + batch_problems(layout, micro, evaluated, uneven=False)

    def cut_problems(self, settings: StepSettings, layout: Layout) -> list[str]:
        micro = settings.micro_batch_size or self._args.micro_batch_size
        batch = settings.global_batch_size or self._args.global_batch_size
        return batch_problems(layout, micro, batch, uneven=False)

    def plan(self, layout: Layout) -> ReshardPlan | None:
        """None: what ranks hold is read of the live model, whatever model it is."""
        return None

    def check_memory(self, plan: ReshardPlan | None, target: Any) -> None:
        check_memory(target, self._model)

    def shards(self, model: Chunks, optimizer: Any, groups: Any) -> Any:
        from megatron.trainer.model.shards import local_shards

        _allocate(optimizer)
        return local_shards(model, optimizer, groups, with_the_rest=True)

    def release(self) -> None:
        self._events("released")
        context = self._context
        context.model = context.optimizer = context.groups = None
        self._own_values = _values_of(self._optimizer)
        Chunks(self._model[:]).detach_hooks()
        self._model.clear()
        # `pretrain` holds the object itself.
        self._optimizer.__dict__.clear()
        self._scheduler.optimizer = None
        self._reset_configuration()
        saving = self._recorded.saving_context
        for name in ("save_strategy", "load_strategy"):
            saving.pop(name, None)
        self._recorded.forget_groups()
        _forget_trackers()
        gc.collect()
        self.is_released = True

    def build_groups(self, target: Any) -> Any:
        from megatron.core.process_groups_config import ProcessGroupCollection

        self._set_arguments(target.layout)
        self._recorded.build_groups(self._args)
        self._recorded.seed(self.state.iteration)
        return ProcessGroupCollection.use_mpu_process_groups()

    def build_model(self, target: Any, groups: Any) -> Chunks:
        """It comes with the optimizer."""
        return Chunks([])

    def build_optimizer(self, target: Any, model: Chunks, groups: Any) -> Any:
        args = self._args
        kept = ("load", "pretrained_checkpoint", "iteration", "train_iters")
        kept += ("num_floating_point_operations_so_far",)
        before = {name: getattr(args, name) for name in kept if hasattr(args, name)}
        args.load = args.pretrained_checkpoint = None
        # One that every layout can cut: that of the next step is set once the layout is there.
        self.set_sizes(args.micro_batch_size * args.data_parallel_size, args.micro_batch_size)
        try:
            model.chunks, optimizer = self._recorded.set_up(groups)
        finally:
            for name, value in before.items():
                setattr(args, name, value)
        _allocate(optimizer)
        for group in optimizer.param_groups:
            group |= {name: x for name, x in self._own_values.items() if name in group}
        return optimizer

    def install(self, target: Any, groups: Any, model: Chunks, optimizer: Any) -> None:
        context, kept = self._context, self._optimizer
        self._model.extend(model.chunks)
        kept.__class__, kept.__dict__ = optimizer.__class__, optimizer.__dict__
        self._scheduler.optimizer = kept
        self._scheduler.step(increment=0)
        context.model, context.optimizer, context.groups = self._model, kept, groups
        context.config = target
        self.is_released = False
        self._events("installed")

    def set_sizes(self, global_batch_size: int, micro_batch_size: int) -> None:
        """Sets the sizes of the steps that follow, for the layout of the arguments. A ramp ends."""
        from megatron.core import num_microbatches_calculator as calculator

        args = self._args
        args.micro_batch_size = micro_batch_size
        calculator.reconfigure_num_microbatches_calculator(
            rank=args.rank,
            rampup_batch_size=None,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            data_parallel_size=args.data_parallel_size,
        )

    # The checkout's arguments and configuration.

    def _arguments_of(self, layout: Layout) -> Any:
        """A copy of the checkout's arguments with the sizes of a layout."""
        args = copy.copy(self._args)
        self._write(layout, args)
        return args

    def _set_arguments(self, layout: Layout) -> None:
        self._write(layout, self._args)
        container = self._recorded.configuration
        if container is not None:
            self._write(layout, container.model.transformer)
            container.ddp.bucket_size = self._recorded.bucket_size
            self._reset_configuration()

    def _reset_configuration(self) -> None:
        container = self._recorded.configuration
        for name, function in self._recorded.of_steps.items():
            setattr(container.model.transformer, name, function)

    def _write(self, layout: Layout, into: Any) -> None:
        """Writes a layout into arguments, or into the configuration of a model: what it has of
        these fields."""
        is_virtual = layout.vpp > 1
        values = {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp if is_virtual else None,
            "context_parallel_size": layout.cp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
            "sequence_parallel": self.wants_sequence_parallel and layout.tp > 1,
            "overlap_p2p_comm": is_virtual,
            "batch_p2p_comm": not is_virtual,
            "tensor_parallel_num_weight_shards": layout.tp,
            "expert_tensor_parallel_num_weight_shards": layout.expert_tensor_parallel_size,
            "transformer_pipeline_model_parallel_size": layout.pp,
            "microbatch_group_size_per_vp_stage": layout.pp,
            "data_parallel_size": layout.dp,
            "num_virtual_stages_per_pipeline_rank": layout.vpp if is_virtual else None,
            "num_layers_per_virtual_pipeline_stage": (
                self._args.num_layers // layout.pp // layout.vpp if is_virtual else None
            ),
        }
        for name, value in values.items():
            if hasattr(into, name):
                setattr(into, name, value)
        if layout.pp > 1 and hasattr(into, "pipeline_dtype"):
            into.pipeline_dtype = into.params_dtype


def _values_of(optimizer: Any) -> dict[str, Any]:
    """What a checkpoint has set in the groups of weights, whatever the flags say."""
    groups = [group for group in optimizer.param_groups if "betas" in group]
    return (
        {name: groups[0][name] for name in ("betas", "eps") if name in groups[0]} if groups else {}
    )


def _drop_graphs(chunk: Any) -> None:
    """Drops results of the last step that modules, and the dispatchers of tokens, still hold."""
    for module in chunk.modules():
        own = [v for v in vars(module).values() if type(v).__module__.startswith("megatron.")]
        for owner in (module, *own):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if getattr(value, "grad_fn", None) is not None:
                    setattr(owner, name, None)


def _allocate(optimizer: Any) -> None:
    """Gives an optimizer its state before its first step, where it has none."""
    from megatron.trainer.model.shards import parts_of

    for part in parts_of(optimizer):
        own = part.optimizer
        if own is None:
            continue
        weights = [weight for group in own.param_groups for weight in group["params"]]
        if any(not own.state[weight] for weight in weights):
            part.init_state_fn(own, part.config)


def _forget_trackers() -> None:
    """Frees groups in what megatron-core remembers between steps for its log."""
    further: Any = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    further.MTPLossLoggingHelper.tracker = {}
    of_experts: dict[str, tuple[str, Any]] = {
        "megatron.core.transformer.moe.moe_logging": ("_MOE_METRICS_TRACKER", None),
        "megatron.core.transformer.moe.moe_utils": ("_MOE_LAYER_WISE_LOGGING_TRACKER", {}),
    }
    for module, (name, empty) in of_experts.items():
        with contextlib.suppress(ImportError):  # the first is of 0.18 and later
            found = importlib.import_module(module)
            if hasattr(found, name):
                setattr(found, name, empty)
