"""What a checkpoint holds, read and checked without a run."""
