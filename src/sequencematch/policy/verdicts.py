"""Types of models that are exact with windows longer than the probe; `docs/models.md` has all verdicts.

Written by `python -m tests.policy.sweep --write`. Needs nothing: `Policy.export` writes this file beside a checkpoint.
"""

EXACT = frozenset(
    """
    afmoe apertus arcee aria_text axk1 beam bert-generation biogpt bitnet codegen cohere cohere2 cohere2_moe
    cohere_compass_text ctrl cwm dbrx deepseek_v2 deepseek_v3 diffllama doge dots1 emu3 ernie4_5 ernie4_5_moe exaone4
    exaone_moe falcon flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text
    gemma4_unified gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox
    gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe kolibri1 laguna llama longcat_flash mellum
    mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral moss_transcribe_diarize
    nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3
    qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma whisper xglm youtu
    """.split()  # noqa: SIM905
)
