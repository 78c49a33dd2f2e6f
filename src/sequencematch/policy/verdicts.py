"""Types of models whose sliding windows were tried and are exact; `docs/models.md` has all verdicts.

Written by `python -m tests.policy.sweep --write`. Needs nothing: `Policy.export` writes this file beside a checkpoint.
"""

WINDOWED = frozenset(
    """
    afmoe beam cohere2 cohere2_moe cohere_compass_text cwm dots1 exaone4 exaone_moe flint gemma2 gemma3 gemma3_text
    gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text got_ocr2 gpt_oss granite_swa granitemoe_swa
    kolibri1 laguna mellum mimo_v2_flash ministral ministral3 mistral mixtral moss_transcribe_diarize olmo3 phi3
    phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe smollm3 starcoder2 vaultgemma
    """.split()  # noqa: SIM905
)
