"""Small random models of every causal-LM type that transformers registers: which can delete? Writes docs/models.md.

Windows and position limits are longer than the probe at loading, and the rows longer than the windows. `python -m
tests.policy.sweep` tries all types and compares with docs/models.md; `--write` writes it, and policy/verdicts.py; `--device
cuda --dtype bfloat16` tries them on a GPU.
"""

import argparse
import json
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sequencematch.core import Trajectory, encode
from sequencematch.policy import Policy, attention
from sequencematch.policy.decoding.decoder_probe import centred

ROOT = Path(__file__).parents[2]
DOCUMENT, VERDICTS = ROOT / "docs" / "models.md", ROOT / "src" / "sequencematch" / "policy" / "verdicts.py"
GPU_SWEEP = ROOT / "results" / "h200" / "sweep_bfloat16.json"
#: Longer than the probe's longest row, shorter than the sweep's.
WINDOW = 24
TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
#: The largest relative errors of logits and gradients, and error of log-probabilities in nats, that rounding explains.
TOLERANCE = {"float32": (1e-4, 1e-3, 1e-3), "bfloat16": (0.05, 0.2, 0.2)}

_WIDTH = (
    "hidden_size",
    "n_embd",
    "d_model",
    "dim_model",
    "embedding_size",
    "embed_dim",
    "word_embed_proj_dim",
    "backbone_hidden_size",
    "attention_hidden_size",
)
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "max_window_layers",
)
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "swa_num_attention_heads",
)
_GROUPS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
_INNER = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "dff",
    "dim_ff",
    "decoder_ffn_dim",
    "encoder_ffn_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "ffn_hidden_size",
    "intermediate_size_mlp",
)
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "model_max_length",
    "n_ctx",
    "max_sequence_length",
)
_WINDOWS = (
    "sliding_window",
    "window_size",
    "local_attention",
    "sliding_window_size",
    "attention_window_size",
    "attention_chunk_size",
    "keep_window_size",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_group")

SMALL: Mapping[str, Any] = (
    dict.fromkeys(_WIDTH, 32)
    | dict.fromkeys(_LAYERS, 2)
    | dict.fromkeys(_HEADS, 4)
    | dict.fromkeys(_GROUPS, 2)
    | dict.fromkeys(_INNER, 48)
    | dict.fromkeys(_POSITIONS, 128)
    | dict.fromkeys(_WINDOWS, WINDOW)
    | dict.fromkeys(_EXPERTS, 4)
    | {
        "vocab_size": 160,
        "type_vocab_size": 2,
        "head_dim": 8,
        "kv_channels": 8,
        "dim_head": 8,
        "attention_head_dim": 8,
        "swa_head_dim": 8,
        "num_experts_per_tok": 2,
        "num_experts_per_token": 2,
        "moe_topk": 2,
        "moe_k": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_expert_group": 1,
        "n_shared_experts": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "qk_head_dim": 16,
        "v_head_dim": 8,
        "rotary_dim": 4,
        "query_pre_attn_scalar": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 160,
        "first_k_dense_replace": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "num_kv_shared_layers": 0,
        "initializer_range": 0.2,
        "init_std": 0.2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "max_window_layers": 1,
        "use_sliding_window": True,
    }
)


#: What a type needs besides.
OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
}


def small_config(config_class: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """A small config of a class: every field whose name is known is set, those of sub-configs too."""
    default = config_class()
    known = vars(default)
    given = {name: value for name, value in SMALL.items() if known.get(name) is not None or name.endswith("_token_id")}
    given |= {name: WINDOW for name in _WINDOWS if name in known}
    if "qk_rope_head_dim" in known:
        given.pop("head_dim", None)  # it is the rotated part's there
        given["num_key_value_heads"] = given["num_attention_heads"]
    is_alone = not getattr(default, "is_encoder_decoder", False)
    given |= {"is_decoder": True} if "is_decoder" in known and is_alone else {}
    given |= {"use_sliding_window": True} if "use_sliding_window" in known else {}
    for name in getattr(default, "sub_configs", {}):
        inner = known.get(name)
        if isinstance(inner, PreTrainedConfig):
            given[name] = small_config(type(inner)).to_dict()
    config = config_class(**(given | dict(OWN.get(default.model_type, {})) | changes))
    kinds = getattr(config, "layer_types", None)
    if kinds and set(kinds) == {"full_attention"} and "sliding_window" in known:
        config.layer_types = ["sliding_attention", *kinds[1:]]  # as other releases of the type may have it
    return config


def small_model(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """The causal LM of a type, small, with weights large enough that attention matters."""
    torch.manual_seed(0)
    config = small_config(CONFIG_MAPPING[model_type], **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def trajectories(policy: Policy) -> list[Trajectory]:
    """Rows deeper than any window, with deletions short and long, one into the prompt; ids from a seeded generator."""
    space, generator = policy.space, torch.Generator().manual_seed(1)
    bk, eos = space.bkspc, space.eos
    allowed = [token for token in range(3, 150) if token not in space.special]

    def tokens(count: int) -> list[int]:
        return [allowed[i] for i in torch.randint(len(allowed), (count,), generator=generator).tolist()]

    long = [*tokens(30), bk, bk, *tokens(3), *[bk] * 12, *tokens(20), eos]
    into = [*tokens(2), *[bk] * 5, *tokens(33), bk, *tokens(2), eos]
    return [
        Trajectory.rollout(space, tokens(6), long),
        Trajectory.rollout(space, tokens(12), into),
        Trajectory.demonstration(space, tokens(3), tokens(9)),
    ]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ of logits less their mean, or of gradients."""
    return float((found - expected).norm() / expected.norm())


def _larger(worst: float, error: float) -> float:
    return worst if error <= worst else error  # NaN is larger than anything


@torch.no_grad()
def logit_error(policy: Policy) -> float:
    """The largest error of an encoded pass over any fifth state, beside a fresh pass over that state alone."""
    batch = trajectories(policy)
    worst = 0.0
    for encoding in (encode(batch), encode(batch, row_length=126, share_prompts=True)):
        with policy.for_scoring():
            hidden = policy.encoded_hidden_states(
                encoding.to(policy.device), encoding.visit.flatten().to(policy.device)
            )
            logits = policy.action_logits(hidden)[:, :-1].unflatten(0, encoding.visit.shape).float()
        for row, trajectory in enumerate(batch):
            for step, state in list(enumerate(trajectory.states()))[::5]:
                worst = _larger(worst, relative_error(*map(centred, (logits[row, step], fresh(policy, state.tokens)))))
    return worst


@torch.no_grad()
def fresh(policy: Policy, tokens: Sequence[int]) -> Tensor:
    """The model's own logits after these tokens, without a cache, a mask or a batch."""
    with policy.for_scoring():
        ids = torch.tensor([list(tokens)], device=policy.device)
        return policy.base(input_ids=ids).logits[0, -1, : policy.space.vocab_size].float()


def gradient_error(policy: Policy) -> float:
    """The error of the gradient of Σ log p(chosen token) with respect to all weights, beside fresh passes."""
    trajectory = trajectories(policy)[0]
    encoding = encode([trajectory]).to(policy.device)
    parameters = [p for p in policy.base.parameters() if p.requires_grad]
    steps = [t for t, action in enumerate(trajectory.chosen) if action != policy.space.bkspc][::7]
    states = [state.tokens for state in trajectory.states()]
    policy.base.eval()
    hidden = policy.encoded_hidden_states(encoding, encoding.visit[0])
    logits = policy.action_logits(hidden)[:, :-1]
    total = torch.stack([logits[t].log_softmax(-1)[trajectory.chosen[t]] for t in steps]).sum()
    alone = torch.zeros((), device=policy.device)
    for t in steps:
        own = policy.base(input_ids=torch.tensor([states[t]], device=policy.device)).logits[
            0, -1, : policy.space.vocab_size
        ]
        alone = alone + own.to(logits.dtype).log_softmax(-1)[trajectory.chosen[t]]
    found, expected = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (total, alone))
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None]
    assert [a is None for a in found] == [b is None for b in expected]
    return relative_error(*(torch.cat([t.flatten().float() for t in side]) for side in zip(*pairs, strict=True)))


def decoding_error(policy: Policy) -> tuple[float, int]:
    """The largest error of a log-probability in a batch that decodes with deletions, in nats; and how many it deleted."""
    prompts = [list(t.initial) for t in trajectories(policy)]
    bias = float(fresh(policy, prompts[0]).logsumexp(-1)) - float(_bkspc_logit(policy, prompts[0]))
    done = policy.generate(prompts, max_new_tokens=40, max_actions=90, seed=0, backspace_bias=bias - 0.7)
    worst, deleted = 0.0, 0
    for trajectory, log_probs in zip(done.trajectories, done.log_probs, strict=True):
        states = list(trajectory.states())
        deleted += trajectory.executed.count(policy.space.bkspc)
        for step in range(0, len(trajectory), 4):
            logits = torch.cat(
                [fresh(policy, states[step].tokens), _bkspc_logit(policy, states[step].tokens)[None] + bias - 0.7]
            )
            if len(states[step].tokens) == 1:
                logits[-1] = -torch.inf
            expected = float(logits.log_softmax(-1)[trajectory.chosen[step]])
            worst = _larger(worst, abs(float(log_probs[step]) - expected))
    return worst, deleted


@torch.no_grad()
def _bkspc_logit(policy: Policy, tokens: Sequence[int]) -> Tensor:
    with policy.for_scoring():
        ids = torch.tensor([list(tokens)], device=policy.device)
        hidden = policy.base.base_model(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state[0, -1]
        return policy.action_logits(hidden)[-1].float()


@dataclass(frozen=True)
class Verdict:
    """What became of a type: "exact" with its errors, "refused" or "not built" with the reason, or "WRONG".

    `windowed`: a sliding window was in force.
    """

    kind: str
    reason: str = ""
    windowed: bool = False
    logits: float = 0.0
    gradients: float = 0.0
    decoding: float = 0.0
    deleted: int = 0


def try_type(model_type: str, device: str = "cpu", dtype: str = "float32") -> Verdict:
    """Build a small model and compare it with fresh passes: with a window if it can have one, else without."""
    whole = _try(model_type, device, dtype, set(TYPES))
    if whole.kind == "exact" or whole.kind == "refused":
        return whole
    without = _try(model_type, device, dtype, set(), sliding_window=None)
    if without.kind == "exact":
        return without
    refused = _try(model_type, device, dtype, set())
    return refused if refused.kind == "refused" else whole


def _try(model_type: str, device: str, dtype: str, windowed: set[str], **changes: Any) -> Verdict:
    """As if the windows of `windowed` types were known to be exact."""
    try:
        model = small_model(model_type, getattr(torch, dtype), **changes).to(device)
    except Exception as error:  # whatever a config says of itself
        return Verdict("not built", _line(error))
    with patch.object(attention, "WINDOWED", windowed):
        try:
            policy = Policy(model)
        except ValueError as error:
            return Verdict("refused", _line(error))
    errors = logit_error(policy), gradient_error(policy), *decoding_error(policy)
    is_exact = all(error <= most for error, most in zip(errors, TOLERANCE[dtype], strict=False))
    has_window = WINDOW in attention.windows(model.config).values()
    return Verdict("exact" if is_exact else "WRONG", "", has_window, *errors)


def _line(error: Exception) -> str:
    text = " ".join(f"{'' if isinstance(error, ValueError) else f'{type(error).__name__}: '}{error}".split())
    return textwrap.shorten(text, 260, placeholder=" …").replace("|", "/")


HEADER = """# Which models can delete

The verdict on every type of causal language model that transformers {version} registers. A small random model of each type, in
float32, scores trajectories of up to 60 tokens with deletions, some into the prompt, as separate rows and packed with shared
prompts; and decodes a batch of prompts of different lengths with deletions. *Exact*: logits, gradients and log-probabilities are
those of fresh forward passes over each state alone, up to rounding: relative errors of at most {most[0]:g} and {most[1]:g}, and
{most[2]:g} nats. *With windows*: a sliding window of {window} tokens was in force, more than the probe at loading can see.

Loading runs a short version of this on *your* model, listed here or not, and refuses a model whose logits differ. A window is
longer than what loading can test: it is refused unless the type is exact *with windows* here. Sliding windows count positions: a
deleted token takes no room in them. Rotary embeddings of type longrope and dynamic change for the whole batch once a row passes
their original length, so the context ends there. FlashAttention takes no mask and is refused; `sdpa`, `eager` and, on a GPU,
`flex_attention` work.

{bfloat16}

`python -m tests.policy.sweep --write` writes this table; the tests try some of its rows again.

| type | verdict |
|---|---|
"""


def in_bfloat16() -> str:
    """What the recorded sweep on a GPU found."""
    found = {name: Verdict(**verdict) for name, verdict in json.loads(GPU_SWEEP.read_text()).items()}
    most = TOLERANCE["bfloat16"]
    accepted = [verdict for verdict in found.values() if verdict.kind in ("exact", "WRONG")]
    within = [verdict for verdict in accepted if verdict.kind == "exact"]
    beyond = sorted(name for name, verdict in found.items() if verdict.kind == "WRONG")
    worst = [max(getattr(verdict, kind) for verdict in within) for kind in ("logits", "gradients", "decoding")]
    return textwrap.fill(
        f"On an H200 in bfloat16 (`results/h200/sweep_bfloat16.json`, transformers 5.17) {len(accepted)} of {len(found)} types "
        f"were accepted. With relative errors of at most {most[0]:g} and {most[1]:g} and {most[2]:g} nats counted as rounding, "
        f"{len(within)} of them are within rounding: their largest errors are {worst[0]:.2g}, {worst[1]:.2g} and "
        f"{worst[2]:.2g} nats. {', '.join(beyond)} exceed these limits; in float32 on the same GPU they are exact. A mixture "
        f"of experts chooses by small differences, which rounding can turn.",
        128,
    )


def table(found: Mapping[str, Verdict]) -> str:
    """docs/models.md."""
    says = {
        "exact": "exact{}",
        "refused": "refused: {}",
        "not built": "not tried, since no small model can be built: {}",
    }
    reasons = {name: ", with windows" if verdict.windowed else verdict.reason for name, verdict in found.items()}
    rows = [f"| {name} | {says[verdict.kind].format(reasons[name])} |\n" for name, verdict in found.items()]
    known = {"version": transformers.__version__, "window": WINDOW, "most": TOLERANCE["float32"]}
    return HEADER.format(bfloat16=in_bfloat16(), **known) + "".join(rows)


def listing(found: Mapping[str, Verdict]) -> str:
    """policy/verdicts.py."""
    kept = " ".join(name for name, verdict in found.items() if verdict.kind == "exact" and verdict.windowed)
    names = textwrap.fill(kept, 118, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return f'''"""Types of models whose sliding windows were tried and are exact; `docs/models.md` has all verdicts.

Written by `python -m tests.policy.sweep --write`. Needs nothing: `Policy.export` writes this file beside a checkpoint.
"""

WINDOWED = frozenset(
    """
{names}
    """.split()  # noqa: SIM905
)
'''


def main() -> None:
    """Try all types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="default: all")
    parser.add_argument("--write", action="store_true", help="write docs/models.md and policy/verdicts.py")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=list(TOLERANCE))
    parser.add_argument("--out", type=Path, help="a JSON file for the verdicts and their errors")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = {name: try_type(name, options.device, options.dtype) for name in tqdm(options.types or TYPES, unit="type")}
    if options.out is not None:
        options.out.write_text(json.dumps({name: asdict(verdict) for name, verdict in found.items()}, indent=1) + "\n")
    wrong = [name for name, verdict in found.items() if verdict.kind == "WRONG"]
    for kind in ("exact", "refused", "not built", "WRONG"):
        print(f"{sum(verdict.kind == kind for verdict in found.values()):4} {kind}")
    if wrong:
        sys.exit(f"Accepted and wrong: {', '.join(f'{name} {asdict(found[name])}' for name in wrong)}")
    if options.types or options.dtype != "float32":
        return
    if options.write:
        DOCUMENT.write_text(table(found))
        VERDICTS.write_text(listing(found))
    if (DOCUMENT.read_text(), VERDICTS.read_text()) != (table(found), listing(found)):
        sys.exit("docs/models.md or policy/verdicts.py is out of date: run again with --write.")


if __name__ == "__main__":
    main()
