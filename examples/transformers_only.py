"""An export deletes with transformers alone: this library is imported to write it and not to use it.

python examples/transformers_only.py out/plain
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = "In base 7, what is 25 + 14? Solution: 5"  # 19 + 11 = 30 = 4·7 + 2: the 5 is wrong


def answer(folder: Path, *, deletes: bool) -> str:
    """What the export makes of the question, with its own decoder or with that of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=deletes)  # custom_generate/generate.py
    inputs = tokenizer(QUESTION, return_tensors="pt")
    options = {"protect_prompt": False} if deletes else {}  # the wrong digit belongs to the prompt
    written = model.generate(**inputs, max_new_tokens=8, do_sample=False, **options)
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


def main(folder: Path) -> None:
    """Export a bundled model, then use it."""
    from sequencematch import Policy

    Policy.from_pretrained("sequencematch/arithmetic").export(folder)
    print("with its own decoder:     ", answer(folder, deletes=True))
    print("with that of transformers:", answer(folder, deletes=False))  # <bkspc> is suppressed


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/plain"))
