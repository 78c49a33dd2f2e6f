"""The bundled base model: a small Llama that adds and subtracts in base 10, and has never seen another base.

    python -m benchmarks.base_model out/base --seed 0        # five minutes on an H200

Its questions have the format of the paper's first task (§6.1), `In base 10, what is 27 - -315? Solution: 342`, so that
fine-tuning on other bases starts from a model that knows the format and carries digits.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Bool, Int, UInt8
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

#: One token per character of printable ASCII, so that other questions can be asked as well, and one per phrase.
CHARACTERS = "".join(map(chr, range(32, 127)))
PHRASES = ("In base", ", what is", "? Solution:")
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
CONTEXT = 128
#: Digits of the longest number, and tokens of the longest row: <s>, a question with two such numbers, its answer and </s>.
MOST_DIGITS, ROW = 12, 53
#: One question in 97, chosen by its numbers, is held out for testing and never trained on.
HELD_OUT = 97


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """Text → `<s>` and one token per character, or per phrase."""
    letters = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens(list(PHRASES))
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", letters["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model."""
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, tie_word_embeddings=True, **SIZES, **tokens
        )
    )


def questions(count: int, rng: np.random.Generator, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Base-10 sums and differences of signed numbers of 1 to 12 digits, only held-out ones or only others."""
    while count:
        digits = rng.integers(1, MOST_DIGITS + 1, (2, count))
        a, b = rng.integers(10 ** (digits - 1) - (digits == 1), 10**digits) * rng.choice([1, 1, -1], (2, count))
        minus = rng.integers(2, size=count)
        kept = ((a * 31 + b * 17 + minus) % HELD_OUT == 0) == held_out
        answers = a + np.where(minus, -b, b)
        for x, y, is_minus, answer in zip(a[kept], b[kept], minus[kept], answers[kept], strict=True):
            yield f"In base 10, what is {x} {'-' if is_minus else '+'} {y}? Solution:", f" {answer}"
        count -= int(kept.sum())


def tokenised(
    count: int, rng: np.random.Generator, *, held_out: bool
) -> tuple[UInt8[Tensor, "row node"], Bool[Tensor, "row node"]]:
    """Padded rows `<s>…</s>`, and a mask of the answers' tokens."""
    # Equals tokenizer("…")["input_ids"], a hundred times as fast: each special token and phrase is a control character.
    letters = {token: chr(number) for number, token in enumerate((*SPECIAL, *PHRASES))}
    ids = np.zeros(128, dtype=np.uint8)
    for letter, token in zip((*letters.values(), *CHARACTERS), (*letters, *CHARACTERS), strict=True):
        ids[ord(letter)] = (*SPECIAL, *CHARACTERS, *PHRASES).index(token)
    pairs = list(questions(count, rng, held_out=held_out))
    text = "".join(f"{letters['<s>']}{prompt}{answer}{letters['</s>']}\n" for prompt, answer in pairs)
    for phrase in PHRASES:
        text = text.replace(phrase, letters[phrase])
    padded = "".join(line.ljust(ROW, letters["<pad>"]) for line in text.splitlines())
    rows = torch.from_numpy(ids[np.frombuffer(padded.encode("ascii"), dtype=np.uint8)]).view(count, ROW)
    start = (rows == int(ids[ord(letters[PHRASES[-1]])])).int().argmax(1, keepdim=True)
    return rows, (torch.arange(ROW) > start) & (rows != 0)


def answer_loss(
    model: nn.Module, rows: Int[Tensor, "row node"], is_answer: Bool[Tensor, "row node"]
) -> tuple[Tensor, Bool[Tensor, "row"]]:
    """Mean cross-entropy of the answers' tokens, and which rows greedy decoding answers right."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
    right, scored = rows[:, 1:], is_answer[:, 1:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), right.flatten(), reduction="none").view_as(right)
    return (loss * scored).sum() / scored.sum(), ((logits.argmax(-1) == right) | ~scored).all(1)


@torch.no_grad()
def accuracy(model: nn.Module, rows: UInt8[Tensor, "row node"], is_answer: Bool[Tensor, "row node"]) -> float:
    """The share of questions that greedy decoding answers right to the last digit."""
    return float(answer_loss(model, rows.long(), is_answer)[1].float().mean())


def main(
    folder: Annotated[Path, typer.Argument(help="Where the model is saved.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and questions.")] = 0,
    steps: Annotated[int, typer.Option(help="Optimisation steps.", min=3)] = 25_000,
    batch_size: Annotated[int, typer.Option(help="Questions per step.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate, after the warm-up.")] = 3e-3,
    drawn: Annotated[int, typer.Option(help="Different questions to train on.")] = 4_000_000,
    tested: Annotated[int, typer.Option(help="Held-out questions to test on.")] = 5_000,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    compiled: Annotated[bool, typer.Option(help="Whether to use torch.compile.")] = True,
) -> None:
    """Train the base model from scratch and save it in bfloat16, with its learning curve."""
    set_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = arithmetic_tokenizer()
    model = llama(tokenizer).to(device)
    rows, is_answer = (x.to(device) for x in tokenised(drawn, rng, held_out=False))
    test = tuple(x.to(device) for x in tokenised(tested, rng, held_out=True))
    run: Any = torch.compile(model) if compiled else model
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, learning_rate, betas=(0.9, 0.98), fused=True)
    warmup = max(0.02, 2 / steps)  # a warm-up of one step would divide by zero
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, steps, pct_start=warmup)
    curve, start = [], time.perf_counter()
    for step in track(range(1, steps + 1), "training"):
        batch = torch.randint(drawn, (batch_size,), device=device)
        with torch.autocast(device, torch.bfloat16):
            loss, _ = answer_loss(run, rows[batch].long(), is_answer[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(steps // 30, 1) == 0 or step == steps:
            with torch.autocast(device, torch.bfloat16):
                right = accuracy(model, *test)
            seconds = round(time.perf_counter() - start, 1)
            curve.append({"step": step, "loss": loss.item(), "accuracy": right, "seconds": seconds})
            print(json.dumps(curve[-1]), flush=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.config.dtype = "float32"  # the dtype to load it in
    model.config.save_pretrained(folder)
    final = accuracy(model.float(), *test)
    record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seed": seed,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "questions": drawn,
        "test_questions": len(test[0]),
        "accuracy": final,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "versions": {"torch": torch.__version__},
        "curve": curve,
    }
    (folder / "curve.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{final:.1%} of {len(test[0])} held-out questions right; wrote {folder}")


if __name__ == "__main__":
    typer.run(main)
