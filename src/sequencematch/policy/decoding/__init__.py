"""Decoding that can delete: a stack of keys and values for each row, on a CPU, on a GPU, and inside transformers (§4.1)."""
