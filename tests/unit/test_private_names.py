"""Private names of megatron-core and torch that we touch: they exist and behave as we rely on.

A new version that breaks one fails here, by its name.
"""

from __future__ import annotations

import inspect
import queue
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from megatron.core import optimizer as core_optimizer
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import (
    common,
    filesystem_async,
    state_dict_saver,
)
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import random as core_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import filesystem

from megatron.trainer.checkpoint import files, save_errors
from megatron.trainer.common.core_version import since
from megatron.trainer.common.device import use_device
from megatron.trainer.common.optional import have_transformer_engine
from megatron.trainer.distributed.process_groups import (
    destroy_groups,
    group_globals,
    set_groups_aside,
    use_groups,
)
from tests.helpers.launch import run_in_fork


def groups_of_one_rank(store: Path) -> dict[str, Any]:
    """What is left after groups were built and destroyed, by megatron-core and by us."""

    def state() -> dict[str, str]:
        found = vars(parallel_state).items()
        return {n: repr(v) for n, v in found if n.startswith("_") and n.isupper()}

    def changed() -> list[str]:
        after = state()
        return [n for n in before if after[n] != before[n]]

    def alive() -> int:
        return len(distributed_c10d._world.pg_map)

    def threads(most: int = 10**6) -> int:
        # A thread that was joined may be counted for a moment.
        for _ in range(100):
            if (number := psutil.Process().num_threads()) <= most:
                break
            time.sleep(0.02)
        return number

    def build() -> None:
        parallel_state.initialize_model_parallel(1, 1, None, create_gloo_process_groups=True)

    before = state()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    build()
    result: dict[str, Any] = {"set": changed(), "built": alive()}
    parallel_state.destroy_model_parallel()
    result |= {"left": changed(), "leaked": alive()}
    build()
    # No variable holds the list: a group that is referred to keeps its threads.
    listed = sum(x is not None for x in parallel_state._global_process_group_list or ())
    result |= {"listed": listed, "threads": [threads()]}
    with use_device("cpu"):
        destroy_groups()
        result["threads"].append(threads(result["threads"][0] - listed))
        result |= {"left_by_us": changed(), "alive": alive()}
        build()
        use_groups(set_groups_aside())
        destroy_groups()
        result["threads"].append(threads(result["threads"][1] + 1))
    return result


def test_megatron_core_forgets_groups_and_globals_and_we_do_not(tmp_path: Path) -> None:
    result = run_in_fork(groups_of_one_rank, tmp_path / "store")
    assert result["left"] and set(result["left"]) <= group_globals().keys(), result
    assert result["leaked"] > 1 and result["listed"] > 1, result
    assert result["left_by_us"] == [] and result["alive"] == result["leaked"], result
    # Each group has threads of its own, which end before `destroy_groups` does. The one for the
    # sockets of all groups stays.
    built, destroyed, after_idle = result["threads"]
    assert after_idle <= destroyed + 1 and destroyed <= built - result["listed"], result


def parameters_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_random_states_are_read_and_set_through_two_functions() -> None:
    assert "clone" in parameters_of(core_random._get_cuda_rng_state)
    assert parameters_of(core_random._set_cuda_rng_state)[0] == "new_state"
    source = inspect.getsource(core_random.CudaRNGStatesTracker)
    assert "_get_cuda_rng_state(" in source and "_set_cuda_rng_state(" in source


def test_the_rotary_embedding_keeps_tensors_in_a_cache_that_can_be_cleared() -> None:
    forward: Any = RotaryEmbedding.forward
    rotary = RotaryEmbedding(kv_channels=8, rotary_percent=1.0, use_cpu_initialization=True)
    forward.cache_clear()
    with use_device("cpu"):
        rotary(4)
    assert forward.cache_info().currsize == 1
    forward.cache_clear()
    assert forward.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (core_optimizer, "Adam"),
        (core_optimizer, "USING_PYTORCH_OPTIMIZER"),
        (distrib_optimizer, "Adam"),
        (distrib_optimizer, "HAVE_APEX_OR_TE"),
        (clip_grads, "l2_norm_impl"),
        (clip_grads, "multi_tensor_scale_impl"),
        (distrib_optimizer, "USING_APEX_OPTIMIZER"),
    ],
)
def test_the_optimizer_looks_up_the_names_we_set(module: Any, name: str) -> None:
    assert name in vars(module)
    lines = inspect.getsource(module).splitlines()
    uses = [line for line in lines if name in line and "import" not in line]
    assert any(f"{name} =" not in line for line in uses), f"{name} is set and never read"


def test_the_norm_is_computed_in_a_method_of_every_optimizer() -> None:
    assert parameters_of(MegatronOptimizer.get_grad_norm) == ["self"]
    assert parameters_of(distrib_optimizer.DistributedOptimizer.step) == ["self"]


@pytest.mark.parametrize("name", ["_fused_adam_", "_fused_adamw_"])
def test_the_fused_kernel_updates_in_place_on_this_device(name: str) -> None:
    p, g, m, v = (torch.full((3,), x) for x in (1.0, 0.5, 0.0, 0.0))
    options: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}
    options |= {"eps": 1e-8, "amsgrad": False, "maximize": False}
    step = torch.ones(())
    getattr(torch, name)([p], [g], [m], [v], [], [step], **options, grad_scale=None, found_inf=None)
    # The first step of Adam has the length of the learning rate.
    torch.testing.assert_close(p, torch.full((3,), 0.9))
    torch.testing.assert_close(m, torch.full((3,), 0.05))
    assert step.item() == 1, "the kernel must leave the step count alone"


def test_a_writer_takes_its_results_from_the_queue_that_the_module_holds() -> None:
    writer = filesystem_async.FileSystemWriterAsync
    made = inspect.getsource(writer.prepare_write_data)
    name = "get_write_results_queue" if since("0.17") else "_get_write_results_queue"
    assert made.count(f"self.results_queue = {name}()") == 1
    held = queue.SimpleQueue()
    with mock.patch.object(filesystem_async, "_results_queue", held):
        assert getattr(filesystem_async, name)() is held
    taken = inspect.getsource(writer.retrieve_write_results)
    assert "self.results_queue.get_nowait()" in taken and "except queue.Empty" in taken
    # By number of the bucket, or an error; see `SaveWrite.finish`.
    assert "isinstance(write_results_or_exc, Exception)" in taken
    assert "chain.from_iterable(write_results.values())" in taken


def test_a_save_request_says_what_is_to_be_written() -> None:
    asked = inspect.getsource(filesystem_async.FileSystemWriterAsync.get_save_function_and_args)
    assert "partial(self.preload_tensors, self.write_buckets, True)" in asked
    assert "[torch.distributed.get_rank(), self.write_buckets, self.results_queue]" in asked
    assert {"async_fn", "async_fn_args", "preload_fn"} <= set(AsyncRequest._fields)
    # What torch's index holds of an item; `test_save_writers` compares all of it.
    assert list(inspect.signature(filesystem._StorageInfo).parameters)[:3] == [
        "relative_path",
        "offset",
        "length",
    ]


def test_a_save_does_what_we_do_without_it() -> None:
    # `begin_request`: what is stored, the common state, the request, and the mark at its end.
    source = inspect.getsource(serialization.save)
    body = source[source.index("content_metadata is not None") :]
    stored = 'key="common_state"' if since("0.19") else "save_common("
    calls = ("save_preprocess(", stored, ".async_save(", ".append(metadata_finalize_fn)")
    places = [body.index(call) for call in calls]
    assert places == sorted(places)
    assert serialization._CONTENT_METADATA_KEY == "content_metadata"
    marks = body[body.index("def metadata_finalize_fn") :]
    assert "CheckpointingConfig(sharded_strategy.backend, sharded_strategy.version)" in marks
    assert marks.index("save_config(") < marks.index("torch.distributed.barrier()")
    assert common.COMMON_STATE_FNAME == files.COMMON
    if since("0.19"):
        assert "replica_id=torch.distributed.get_rank()" in body
        return
    where: Any = common if since("0.17") else common.TorchCommonSaveStrategy
    assert "torch.save(common_state_dict" in inspect.getsource(where.save_common)


def test_a_load_does_what_we_do_without_it() -> None:
    # `_load`: of the common state alone we take another one.
    source = inspect.getsource(serialization.load)
    calls = (
        "force_all_tensors_to_non_fp8(",
        "load_preprocess(",
        "nonpersistent_state_dict)",
        "extract_sharded_base(",
        "load_sharded_metadata(",
        "determine_global_metadata(",
        "validate_integrity_and_strict_load(",
        "sharded_strategy.load(",
        "loaded_state_dict)",
        "apply_factory_merges(",
    )
    places = [source.index(call) for call in calls]
    assert places == sorted(places)


def test_a_save_writes_by_the_writer_that_the_module_names() -> None:
    save_errors.use_own_writer()
    made = inspect.getsource(torch_strategy.TorchDistSaveShardedStrategy.async_save)
    if since("0.17"):
        strategies: Any = torch_strategy
        _, modules = strategies.get_async_strategy("mcore")
        assert modules["FileSystemWriterAsync"] is save_errors._Writer
        assert made.count('modules["FileSystemWriterAsync"]') == 1
    else:
        assert torch_strategy.FileSystemWriterAsync is save_errors._Writer
        assert made.count("FileSystemWriterAsync(") == 1
    writer, theirs = save_errors._Writer, save_errors._Writer.__mro__[1]
    for method in ("finish", "prepare_local_plan"):
        assert parameters_of(getattr(theirs, method)) == parameters_of(getattr(writer, method))
    # Besides these, a plan and an index touch no file.
    plan = inspect.getsource(filesystem._FileSystemWriter.prepare_local_plan)
    assert "self.fs.mkdir(self.path)" in plan and "if self._metadata_exists():" in plan
    index = inspect.getsource(filesystem._FileSystemWriter.finish)
    assert 'self.fs.create_stream(tmp_path, "wb")' in index
    # The first finalization gathers what was written; rank 0 alone writes the index, and then
    # tells the others.
    source = inspect.getsource(state_dict_saver.save_state_dict_async_finalize)
    places = [source.index(f"{name}(") for name in ("gather_object", "writer.finish", "broadcast")]
    assert places == sorted(places) and source.count("distributed.broadcast(") == 1
    assert "finalize_fns" in AsyncRequest._fields


def test_a_model_asks_for_stored_objects_only_by_their_kind() -> None:
    source = inspect.getsource(make_sharded_tensors_for_checkpoint)
    assert "_extra_state" in source and "make_sharded_object_for_checkpoint(" in source


def test_weights_are_shared_through_names_of_buckets() -> None:
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel

    group = buffers._ParamAndGradBucketGroup
    made = inspect.getsource(group.__init__)
    assert "self.intra_distributed_optimizer_instance_group" in made
    assert "self.param_gather_dispatched = False" in made
    assert "if not self.param_gather_dispatched" in inspect.getsource(group.finish_param_sync)
    assert "bucket.param_data" in inspect.getsource(group.start_param_sync)
    wrapper = inspect.getsource(DistributedDataParallel.__init__)
    assert "self.bucket_groups" in wrapper and "self.expert_parallel_bucket_groups" in wrapper
    whole = torch.arange(12)
    for ours, theirs in zip(whole.chunk(3), buffers.shard_buffer(whole, 3), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_are_reduced_through_names_of_buckets() -> None:
    from megatron.core.distributed import param_and_grad_buffer as buffers

    group = buffers._ParamAndGradBucketGroup
    assert "self.data_parallel_group = collective_group" in inspect.getsource(group.__init__)
    # What compression puts another method in place of, and all that this one does besides.
    assert "self.start_grad_sync(" in inspect.getsource(group.finish_grad_sync)
    source = inspect.getsource(group.start_grad_sync)
    assert "bucket.grad_data *= bucket.gradient_scaling_factor" in source
    assert "if self.ddp_config.average_in_collective" in source
    assert list(inspect.signature(group.start_grad_sync).parameters) == ["self", "force_all_reduce"]


def test_latent_attention_believes_that_transformer_engine_is_there() -> None:
    # What `LatentAttention` mends: the wrapper imports without it, and its classes are none.
    if not have_transformer_engine():
        assert not isinstance(multi_latent_attention.TELinear, type)
    source = inspect.getsource(multi_latent_attention.MultiLatentAttention.__init__)
    assert "and isinstance(self.linear_proj, TELinear)" in source
    layers = inspect.getsource(multi_latent_attention.MLASelfAttention.__init__)
    assert "self.linear_kv_down_proj = build_module" in layers


def test_further_losses_are_added_up_in_a_tracker() -> None:
    MTPLossLoggingHelper.tracker.clear()
    helper: Any = MTPLossLoggingHelper
    one = torch.tensor(1.0)
    with use_device("cpu"):
        for _ in range(2):
            if since("0.19"):
                helper.save_metrics_to_tracker(1.5 * one, one, one, 1, 2)
            else:
                helper.save_loss_to_tracker(1.5 * one, 1, 2)
    assert helper.tracker["loss_values" if since("0.19") else "values"].tolist() == [0.0, 3.0]
    MTPLossLoggingHelper.tracker.clear()


def test_messages_between_stages_start_in_two_ways() -> None:
    from megatron.core.pipeline_parallel import p2p_communication as p2p

    names = [f"tensor_{way}_{side}" for side in ("prev", "next") for way in ("send", "recv")]
    wanted = [*names, "group", "prev_pipeline_rank", "next_pipeline_rank"]
    for start in (p2p._batched_p2p_ops, p2p._p2p_ops):
        assert list(inspect.signature(start).parameters) == wanted
    # What an interleaved schedule waits for, by name.
    source = inspect.getsource(p2p._p2p_ops)
    assert all(f'reqs["{name.removeprefix("tensor_")}"]' in source for name in names)
    assert "p2p_func = _batched_p2p_ops" in inspect.getsource(p2p.P2PCommunicator._communicate)
