"""SequenceMatch: language models that can delete what they wrote (Cundy & Ermon, ICLR 2024)."""

__version__ = "0.1.0"
