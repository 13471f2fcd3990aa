"""The controller in a Megatron-LM checkout; see docs/megatron-lm.md."""
