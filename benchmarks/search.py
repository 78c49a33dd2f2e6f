"""Search beside ordinary decoding: actions per second."""

from collections.abc import Iterator
from typing import Any

from benchmarks.peers import with_attention
from benchmarks.session import Session, random_prompts
from benchmarks.timing import Call, Measurement, measured, paired
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX

PLAIN, CONTROL, SEARCHING = "Policy.generate", "Policy.generate (A/A control)", "Policy.generate, search"
#: Prompts per slot on a GPU. With one, a few rows that search longer would run alone at the end; ordinary decoding has none
#: here. On a CPU such rows cost nothing more: rows that have ended are dropped.
PROMPTS_PER_SLOT = 4


def search(session: Session) -> Iterator[Measurement]:
    """Actions per second of a search over those of ordinary decoding, at temperature 1.

    Ordinary decoding does not delete here. A search deletes at full length, where it finds no `<eos>`, and tries other tokens.
    """
    scale = session.scale
    policy = session.policy(scale.decoding)
    policy.eval()
    batch, new_tokens = scale.decoding_batch, scale.decoding_new
    count = batch * (PROMPTS_PER_SLOT if policy.device.type == "cuda" else 1)
    prompts = random_prompts(policy, count, scale.decoding_prompt)
    actions, passes = dict[str, int](), dict[str, int]()

    def ours(name: str, **options: Any) -> Call:
        def run() -> None:
            result = policy.generate(
                prompts, max_new_tokens=new_tokens, seed=0, batch_size=batch, backspace_bias=-1e4, **options
            )
            actions[name], passes[name] = sum(map(len, result.trajectories)), result.forward_passes

        return with_attention(policy, CAUSAL_PREFIX, run)

    seconds = session.seconds(
        "search",
        {
            PLAIN: ours(PLAIN, protect_prompt=True),
            CONTROL: ours(CONTROL, protect_prompt=True),
            SEARCHING: ours(SEARCHING, search=True, temperature=1.0, max_actions=new_tokens + max(3, new_tokens // 4)),
        },
    )
    detail: dict[str, Any] = {"model": scale.decoding.name, "batch": batch, "new_tokens": new_tokens}
    detail |= {"prompts": len(prompts), "actions": actions, "forward_passes": passes}
    for name, target in ((CONTROL, "control"), (SEARCHING, "search")):
        more = actions[name] / actions[PLAIN]
        ratios = [more * ratio for ratio in paired(seconds, PLAIN, name)]
        yield measured("search", f"{name} / {PLAIN}, actions per second", ratios, target=target, detail=detail)
