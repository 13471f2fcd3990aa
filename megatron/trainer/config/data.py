"""Where samples come from and how text becomes tokens."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.trainer.config.fields import option


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data sets, their split, and the tokenizer."""

    data_path: tuple[str, ...] | None = option(None, nargs="*")
    """Prefix of an indexed data set. For a blend: weight and prefix in turn. --split divides it."""
    train_data_path: tuple[str, ...] | None = option(None, nargs="*")
    """Like --data-path, for training only."""
    valid_data_path: tuple[str, ...] | None = option(None, nargs="*")
    """Like --data-path, for validation only."""
    test_data_path: tuple[str, ...] | None = option(None, nargs="*")
    """Like --data-path, for testing only."""
    data_cache_path: str | None = option(None)
    """Folder for the index files, shared by all ranks."""
    split: str | None = option(None)
    """Shares of documents for training, validation and test. Default with --data-path: 969, 30,
    1."""
    mock_data: bool = option(False)
    """Made-up samples in place of a data set."""
    num_workers: int = option(2)
    """Loader processes of each rank. Default on CPU: 0."""
    dataloader_type: str = option(None, choices=("single", "cyclic", "external"))
    """Order of samples. Only single (in order) is supported. It is the default."""
    data_sharding: bool = option(True, "--no-data-sharding")
    """Accepted. The single loader has no shards."""
    mmap_bin_files: bool = option(True, "--no-mmap-bin-files")
    """Read .bin files by memory mapping."""
    create_attention_mask_in_dataloader: bool = option(
        True, "--no-create-attention-mask-in-dataloader"
    )
    """Accepted. The causal mask is always made inside the attention."""
    reset_position_ids: bool = option(False)
    """Start positions again after each end-of-document token."""
    eod_mask_loss: bool = option(False)
    """Leave end-of-document tokens out of the loss."""
    tokenizer_type: str = option(None)
    """Kind of tokenizer. Default: GPT2BPETokenizer."""
    tokenizer_model: str | None = option(None)
    """File, folder or name the tokenizer is read from."""
    vocab_file: str | None = option(None)
    """Vocabulary file of a byte-pair tokenizer."""
    merge_file: str | None = option(None)
    """Merge file of a byte-pair tokenizer."""
    tiktoken_pattern: str | None = option(None)
    """Name of the split pattern of a tiktoken tokenizer: v1 or v2."""
    tiktoken_num_special_tokens: int = option(1000)
    """Number of special tokens of a tiktoken tokenizer."""
    tiktoken_special_tokens: tuple[str, ...] | None = option(None, nargs="+")
    """Special tokens of a tiktoken tokenizer."""
    tokenizer_hf_include_special_tokens: bool = option(
        True, "--tokenizer-hf-no-include-special-tokens"
    )
    """Text without what the post-processor of HuggingFaceTokenizer adds, such as BOS."""
    legacy_tokenizer: bool = option(False)
    """Names of special tokens in a text are text for TikTokenizer and GPT2BPETokenizer, too. The
    other types have Megatron-LM's legacy tokens in any case."""
