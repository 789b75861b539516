"""Alignment of language models on Megatron-Core. Read by setup.py and `aligner --version`."""

__version__ = "0.3.0"
