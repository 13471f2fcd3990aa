"""The commands: one module each, with `main(argv)`, which returns the exit code.

`copus NAME` runs them where the package is installed, `tools/NAME.py` and `pretrain_gpt.py` from a
checkout.
"""
