"""What a checkout's own functions were called with when it started, so that they can be called
again: for another layout, another micro-batch, or both.

Nothing here knows what these functions take beyond the names that it changes.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
from collections.abc import Callable
from typing import Any

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Of `initialize_model_parallel`, by the names that arguments have, too."""
OF_STEPS = (
    "finalize_model_grads_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "grad_scale_func",
)
"""Of a model's configuration: `train` sets them to functions of the model and the optimizer."""


class Recorded:
    """Wraps the functions that build what belongs to a layout, and calls them again.

    Args:
        training: the module `megatron.training.training`, whose `pretrain` looks them up when it
            calls them.
    """

    def __init__(self, training: Any) -> None:
        self._training = training
        self._initialize: Any = importlib.import_module("megatron.training.initialize")
        self._checkpointing: Any = importlib.import_module("megatron.training.checkpointing")
        self._groups: Any = importlib.import_module("megatron.core.parallel_state")
        self._plain: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._calls: dict[str, inspect.BoundArguments] = {}
        self._provider: Any = None
        self._sizes: Any = None
        self._data_sets: dict[Any, Any] = {}
        self._stage: int | None = None
        self.bucket_size: int | None = None
        """Of gradient buffers, as the user has it."""
        self.of_steps: dict[str, Any] = {}
        """Functions of the model's configuration, as the user has them."""
        self.valid_iterator: Any = None
        """Since the first change: what stands for the one that `pretrain` holds."""
        self.test_iterator: Any = None
        self.before_groups: Callable[[], None] = lambda: None
        """Called once the arguments are known, before anything is built."""
        self.state_of: Callable[[], str] | None = None
        """What the controller wants to be saved with the next checkpoint."""
        self.on_saved: Callable[[], None] = lambda: None
        """Called when a checkpoint is written, or begun where it is written meanwhile."""
        self.loaded_state: str | None = None
        """That of the checkpoint that the run goes on with."""
        self.loaded_arguments: Any = None
        """Those of that checkpoint."""
        self.has_own_groups = False
        """Whether the script gives process groups of its own to `pretrain`."""
        self.has_changed = False
        """Whether the iterators are others than those of `pretrain`."""
        self._wrap()

    def _wrap(self) -> None:
        training = self._training
        for module, name in (
            (training, "setup_model_and_optimizer"),
            (self._groups, "initialize_model_parallel"),
            (self._initialize, "_set_random_seed"),
        ):
            self._set(module, name, self._recording(module, name))
        self._set(training, "build_train_valid_test_data_iterators", self._first_iterators)
        self._set(training, "build_train_valid_test_datasets", self._kept_data_sets)
        self._set(training, "get_train_valid_test_num_samples", self._pinned_sizes)
        self._set(training, "evaluate_and_print_results", self._evaluated)
        self._set(training, "save_checkpoint", self._saved)
        self._set(self._checkpointing, "check_checkpoint_args", self._loaded)

    def _set(self, module: Any, name: str, function: Any) -> None:
        self._plain[id(module), name] = module, name, getattr(module, name)
        setattr(module, name, function)

    def undo(self) -> None:
        """Takes the wrappers off again."""
        for module, name, function in self._plain.values():
            setattr(module, name, function)

    def _plain_of(self, module: Any, name: str) -> Any:
        return self._plain[id(module), name][2]

    def _recording(self, module: Any, name: str) -> Callable[..., Any]:
        def recorded(*args: Any, **named: Any) -> Any:
            plain = self._plain_of(module, name)
            if name not in self._calls:
                if module is self._groups:
                    self.before_groups()
                    gc.collect()
                    gc.freeze()  # what imports have made; a change of layout collects
                self._calls[name] = call = inspect.signature(plain).bind(*args, **named)
                if (container := call.arguments.get("cfg_container")) is not None:
                    self._note_configuration(container)
            return plain(*args, **named)

        return recorded

    def _note_configuration(self, container: Any) -> None:
        """Notes what the builder and `train` write into the container under the first layout."""
        self.bucket_size, model = container.ddp.bucket_size, container.model.transformer
        self.of_steps = {name: getattr(model, name) for name in OF_STEPS if hasattr(model, name)}

    def _saved(self, *args: Any, **named: Any) -> Any:
        """The arguments are a part of every checkpoint, and so is what stands among them."""
        if self.state_of is not None:
            self._training.get_args().copus_state = self.state_of()
        result = self._plain_of(self._training, "save_checkpoint")(*args, **named)
        self.on_saved()
        return result

    def _loaded(self, saved: Any, *more: Any, **named: Any) -> Any:
        self.loaded_state = getattr(saved, "copus_state", None)
        self.loaded_arguments = saved
        plain = self._plain_of(self._checkpointing, "check_checkpoint_args")
        return plain(saved, *more, **named)

    # Building again.

    @property
    def configuration(self) -> Any:
        """The container of configurations that releases from 0.19 on build from; None before."""
        return self._calls["setup_model_and_optimizer"].arguments.get("cfg_container")

    @property
    def saving_context(self) -> dict[str, Any]:
        """What the checkout keeps from one save to the next."""
        call = self._calls["setup_model_and_optimizer"]
        return call.arguments.get("checkpointing_context") or {}

    def build_groups(self, args: Any) -> None:
        """Builds the process groups of the sizes in the arguments. Collective."""
        call = self._calls["initialize_model_parallel"]
        call.arguments |= {name: getattr(args, name) for name in _SIZES}
        self._plain_of(self._groups, "initialize_model_parallel")(*call.args, **call.kwargs)

    def seed(self, iteration: int) -> None:
        """Seeds all random streams for the steps after an iteration."""
        call = self._calls["_set_random_seed"]
        given = call.arguments["seed_"]
        again = inspect.BoundArguments(call.signature, type(call.arguments)(call.arguments))
        if given:
            # Else dropout would go through the masks of the first steps again.
            again.arguments["seed_"] = given + 1000 * iteration
        self._plain_of(self._initialize, "_set_random_seed")(*again.args, **again.kwargs)

    def set_up(self, groups: Any) -> tuple[list[Any], Any]:
        """A new model and optimizer, with nothing loaded. Collective."""
        call = self._calls["setup_model_and_optimizer"]
        if "pg_collection" in call.signature.parameters:
            call.arguments["pg_collection"] = groups
        plain = self._plain_of(self._training, "setup_model_and_optimizer")
        try:
            model, optimizer, _ = plain(*call.args, **call.kwargs)
        finally:
            self.forget_groups()
        return model, optimizer

    def forget_groups(self) -> None:
        """Lets go of what would keep the groups of a layout alive."""
        for call in self._calls.values():
            if call.arguments.get("pg_collection") is not None:
                call.arguments["pg_collection"] = None

    # Data.

    def _first_iterators(self, provider: Any) -> Any:
        while isinstance(provider, functools.partial):  # one for each virtual stage
            provider = provider.func
        self._provider = provider
        self._stage = 0 if self._stage is None else self._stage + 1
        return self._iterators_of(self._stage)

    def _iterators_of(self, stage: int) -> Any:
        provider, args = self._provider, self._training.get_args()
        self._stage = stage
        if args.virtual_pipeline_model_parallel_size is not None:
            provider = functools.partial(self._provider, vp_stage=stage)
            if getattr(self._provider, "is_distributed", False):
                provider.is_distributed = True  # type: ignore[attr-defined]
        plain = self._plain_of(self._training, "build_train_valid_test_data_iterators")
        return plain(provider)

    def iterators(self, args: Any, *, is_new_layout: bool) -> tuple[Any, Any]:
        """Iterators of training and validation data that go on where the arguments stand.
        Collective.

        Args:
            is_new_layout: whether other ranks may read now; else the data sets are kept.
        """
        if is_new_layout:
            self._data_sets.clear()
        stages = args.virtual_pipeline_model_parallel_size
        found = [self._iterators_of(stage) for stage in range(stages or 1)]
        train, self.valid_iterator, self.test_iterator = (
            map(list, zip(*found, strict=True)) if stages else found[0]
        )
        self.has_changed = True
        return train, self.valid_iterator

    @property
    def takes_virtual_stages(self) -> bool:
        """Whether the script's provider of data can build those of one virtual stage."""
        return "vp_stage" in inspect.signature(self._provider).parameters

    def _kept_data_sets(self, provider: Any, *more: Any, **named: Any) -> Any:
        key = self._stage
        if key not in self._data_sets:
            plain = self._plain_of(self._training, "build_train_valid_test_datasets")
            self._data_sets[key] = plain(provider, *more, **named)
        return self._data_sets[key]

    def _pinned_sizes(self) -> Any:
        """The data sets are shuffled by their size, which would follow the batch."""
        if self._sizes is None:
            self._sizes = self._plain_of(self._training, "get_train_valid_test_num_samples")()
        return self._sizes

    def _evaluated(self, *args: Any, **named: Any) -> Any:
        """`pretrain` evaluates at its end with the iterators and the configuration that it holds
        since the start."""
        plain = self._plain_of(self._training, "evaluate_and_print_results")
        call = inspect.signature(plain).bind(*args, **named)
        if self.has_changed:
            is_test = "on test set" in str(call.arguments["prefix"])
            call.arguments["data_iterator"] = self.test_iterator if is_test else self.valid_iterator
            model = call.arguments["model"]
            call.arguments["config"] = self._training.get_model_config(model[0])
        # Tensor parallel ranks wait for micro-batches of the size in the arguments.
        own = self._training.get_args()
        micro = own.micro_batch_size
        own.micro_batch_size = getattr(own, "eval_micro_batch_size", None) or micro
        try:
            return plain(*call.args, **call.kwargs)
        finally:
            own.micro_batch_size = micro
