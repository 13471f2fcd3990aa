"""Adam over megatron-core's optimizers, and its state."""
