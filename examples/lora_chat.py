"""LoRA on a chat dataset: conversations as `messages`, a chat template, an adapter with its `<bkspc>` row beside it.

    python examples/lora_chat.py out/chat [--quick]

The model is a tiny one made on the spot, so that the script runs anywhere in seconds; it learns its eight answers by heart.
With a model of your own, drop `tiny_model`: `SequenceMatchTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", …)`.
"""

import sys
from pathlib import Path

from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from sequencematch import Policy, SequenceMatchConfig, SequenceMatchTrainer

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Peru": "Lima"}
CAPITALS |= {"Japan": "Tokyo", "Egypt": "Cairo", "Cuba": "Havana", "Norway": "Oslo"}
ROWS = [
    {"messages": [{"role": "user", "content": f"Capital of {country}?"}, {"role": "assistant", "content": capital}]}
    for country, capital in CAPITALS.items()
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'][0] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)


def tiny_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A Llama with random weights that reads letters, and its tokenizer with a chat template."""
    texts = "".join(message["content"] for row in ROWS for message in row["messages"])
    names = ["<s>", "</s>", "<|u|>", "<|a|>", *sorted(set(texts))]
    core = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<s>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|u|>", "<|a|>"],
        chat_template=TEMPLATE,
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(names), bos_token_id=0, eos_token_id=1, **sizes)), tokenizer


def main(folder: Path, *, quick: bool) -> None:
    """Train an adapter, save it, load it on its base again, and ask."""
    model, tokenizer = tiny_model()
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    lora = LoraConfig(
        r=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"],
        modules_to_save=["embed_tokens", "lm_head"],  # this model is random; a trained one does without
        task_type="CAUSAL_LM",
    )
    args = SequenceMatchConfig(
        output_dir=str(folder / "run"),
        objective="bc",
        noise_rate=0.2,
        max_steps=4 if quick else 300,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        max_length=64,
        use_cpu=True,
        save_strategy="no",
        logging_steps=50,
    )
    trainer = SequenceMatchTrainer(str(folder / "base"), args, train_dataset=ROWS, peft_config=lora)
    trainer.train()
    trainer.save_model()
    policy = Policy.from_pretrained(folder / "run")  # the adapter, the <bkspc> row, and the base by its name
    asked = [[{"role": "user", "content": f"Capital of {country}?"}] for country in CAPITALS]
    answers = policy.generate(asked, temperature=0, max_new_tokens=10).texts
    right = sum(text == capital for text, capital in zip(answers, CAPITALS.values(), strict=True))
    print(
        f"{right} of {len(asked)} answers right; the adapter's folder has",
        *sorted(p.name for p in (folder / "run").iterdir()),
    )


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if argument != "--quick"]
    main(Path(names[0] if names else "out/chat"), quick="--quick" in sys.argv)
