"""Search beside ordinary decoding: actions per second."""

import math
from collections.abc import Iterator
from typing import Any

from benchmarks.peers import with_attention
from benchmarks.session import Session, random_prompts
from benchmarks.timing import Call, Measurement, measured, paired
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX

PLAIN, CONTROL, SEARCHING = "Policy.generate", "Policy.generate (A/A control)", "Policy.generate, search"
#: The share of actions that delete, about, in both variants: rows of ordinary decoding must not all end at the same step, where
#: those of a search don't.
DELETIONS = 0.1
#: Prompts per slot on a GPU, so that a row that ends late holds up no others. On a CPU rows that have ended are dropped.
PROMPTS_PER_SLOT = 4


def search(session: Session) -> Iterator[Measurement]:
    """Actions per second of a search over those of ordinary decoding, at temperature 1; both delete a tenth of the time.

    Random weights find every token about as likely, so a search finds no dead ends but at full length, where it has no `<eos>`:
    it deletes there until its actions are used up. Ordinary decoding ends at full length.
    """
    scale = session.scale
    policy = session.policy(scale.decoding)
    policy.eval()
    batch, new_tokens = scale.decoding_batch, scale.decoding_new
    count = batch * (PROMPTS_PER_SLOT if policy.device.type == "cuda" else 1)
    prompts = random_prompts(policy, count, scale.decoding_prompt)
    bias = math.log(policy.space.vocab_size * DELETIONS / (1 - DELETIONS))
    # As many as it takes to write all tokens if a tenth of the actions deletes one.
    limit = math.ceil((new_tokens + 1) / (1 - 2 * DELETIONS))
    actions, deletions, passes = dict[str, int](), dict[str, int](), dict[str, int]()

    def ours(name: str, **options: Any) -> Call:
        def run() -> None:
            result = policy.generate(
                prompts,
                max_new_tokens=new_tokens,
                max_actions=limit,
                seed=0,
                temperature=1.0,
                batch_size=batch,
                backspace_bias=bias,
                **options,
            )
            actions[name], passes[name] = sum(map(len, result.trajectories)), result.forward_passes
            deletions[name] = sum(t.chosen.count(policy.space.bkspc) for t in result.trajectories)

        return with_attention(policy, CAUSAL_PREFIX, run)

    variants = {PLAIN: {"protect_prompt": True}, CONTROL: {"protect_prompt": True}, SEARCHING: {"search": True}}
    seconds = session.seconds("search", {name: ours(name, **options) for name, options in variants.items()})
    detail: dict[str, Any] = {"model": scale.decoding.name, "batch": batch, "new_tokens": new_tokens}
    detail |= {"prompts": len(prompts), "actions": actions, "deletions": deletions, "forward_passes": passes}
    for name, target in ((CONTROL, "control"), (SEARCHING, "search")):
        more = actions[name] / actions[PLAIN]
        ratios = [more * ratio for ratio in paired(seconds, PLAIN, name)]
        yield measured("search", f"{name} / {PLAIN}, actions per second", ratios, target=target, detail=detail)
