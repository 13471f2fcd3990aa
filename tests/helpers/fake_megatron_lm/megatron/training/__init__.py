"""The seams of a Megatron-LM checkout: names, order of calls and what they return."""
