"""Process groups of a layout, which part of a tensor a rank holds, and slow ranks."""
