"""Which node holds which ranks."""
