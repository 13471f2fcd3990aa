"""The GPT, its initial weights, its cost in operations, and its shards."""
