"""Rows, files and settings: read before a model is loaded, and written after. Needs torch, and no transformers."""
