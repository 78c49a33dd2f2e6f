"""A policy that learns to delete, small enough to watch: one logit per (prefix, action), no transformer, seconds on a CPU.

It writes words letter by letter. Maximum likelihood, behavioural cloning and SequenceMatch are trained on the same words;
then each is given a prefix with a wrong last letter. Only a policy that has learnt `<bkspc>` can correct it.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sequencematch.core.encoding import encode
from sequencematch.core.mdp import ActionSpace, State, Trajectory, step
from sequencematch.core.noise import add_noise, token_noise
from sequencematch.core.objectives import Scores, bc_loss, mle_loss, sequencematch_loss

WORDS = ("cat", "car", "care", "cod", "code", "do", "dot", "dear", "era", "eat", "tea", "tear", "toad", "road", "rat")
LETTERS = sorted(set("".join(WORDS)))
SPACE = ActionSpace(vocab_size=len(LETTERS) + 2, eos=len(LETTERS), bos=len(LETTERS) + 1)
BOS, EOS = len(LETTERS) + 1, len(LETTERS)
MAX_LENGTH, MAX_ACTIONS = 5, 16  # the longest word and a wrong letter
GAMMA, ALPHA, NOISE_RATE = 0.9, 0.1, 0.2


def spell(tokens: Sequence[int]) -> str:
    """Token ids → text, `<bos>` and `<eos>` left out."""
    return "".join(LETTERS[token] for token in tokens if token < len(LETTERS))


def unspell(text: str) -> tuple[int, ...]:
    """Text → a state's tokens, starting with `<bos>`."""
    return (BOS, *(LETTERS.index(letter) for letter in text))


#: Every state there is: all strings up to MAX_LENGTH, running or ended.
STATES = {
    State(tokens, ended): None
    for length in range(MAX_LENGTH + 1)
    for letters in itertools.product(range(len(LETTERS)), repeat=length)
    for tokens, ended in (((BOS, *letters), False), ((BOS, *letters, EOS), True))
}
INDEX = {state: index for index, state in enumerate(STATES)}


def rollout(logits: Tensor, prompt: tuple[int, ...], generator: torch.Generator) -> Trajectory:
    """Sample actions until `<eos>`; a letter beyond MAX_LENGTH, or one action too many, is cut."""
    state, actions = State(prompt), list[int]()
    while True:
        probabilities = logits[INDEX[state]].softmax(0)
        actions.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        too_long = actions[-1] < EOS and len(state.tokens) > MAX_LENGTH
        if actions[-1] == EOS or too_long or len(actions) == MAX_ACTIONS:
            return Trajectory.rollout(SPACE, prompt, actions)
        state = step(SPACE, state, actions[-1])


def score(logits: Tensor, batch: Sequence[Trajectory], backspace: bool = True) -> Scores:
    """Look up the logits of every visited state. A transformer would compute them from `encode(batch)`."""
    encoding = encode(batch)
    rows = [[INDEX[state] for state in trajectory.states()] for trajectory in batch]
    longest = encoding.visit.shape[1]
    visits = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows])
    return Scores.from_logits(logits[visits], encoding, backspace=backspace)


def allowed(backspace: bool) -> Tensor:
    """A mask to add to all logits: it forbids `<bos>`, and `<bkspc>` unless `backspace`."""
    mask = torch.zeros(SPACE.size)
    mask[BOS] = -torch.inf
    mask[SPACE.bkspc] = 0 if backspace else -torch.inf
    return mask


@dataclass(frozen=True)
class Objective:
    """A way to train: its noise rate, and a loss of the logits on a batch of data."""

    noise_rate: float
    loss: Callable[[Tensor, Sequence[Trajectory], torch.Generator], Tensor]


def _sequencematch(logits: Tensor, data: Sequence[Trajectory], generator: torch.Generator) -> Tensor:
    rollouts = [rollout(logits.detach(), (BOS,), generator) for _ in data]
    ours = sequencematch_loss(score(logits, data), score(logits, rollouts), alpha=ALPHA, gamma=GAMMA).loss
    return 0.2 * bc_loss(score(logits, data)) + 0.8 * ours


OBJECTIVES = {
    "MLE": Objective(0.0, lambda logits, data, _: mle_loss(score(logits, data, backspace=False))),
    "BC": Objective(NOISE_RATE, lambda logits, data, _: bc_loss(score(logits, data))),
    "SequenceMatch": Objective(NOISE_RATE, _sequencematch),
}


def train(objective: Objective, steps: int, seed: int, batch: int = 32) -> Tensor:
    """Adam on the table of logits; noise and rollouts are drawn anew at every step."""
    generator = torch.Generator().manual_seed(seed)
    noise = token_noise(SPACE)
    table = torch.zeros(len(INDEX), SPACE.size, requires_grad=True)
    mask = allowed(backspace=objective.noise_rate > 0)
    optimizer = torch.optim.Adam([table], lr=0.1)
    for _ in range(steps):
        picks = torch.randint(len(WORDS), (batch,), generator=generator).tolist()
        clean = [Trajectory.demonstration(SPACE, (BOS,), unspell(WORDS[pick])[1:]) for pick in picks]
        data = [add_noise(word, objective.noise_rate, noise, generator) for word in clean]
        loss = objective.loss(table + mask, data, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (table + mask).detach()


def mistakes() -> list[str]:
    """Every beginning of a word plus one wrong letter: no word starts like this."""
    prefixes = {word[:length] for word in WORDS for length in range(len(word) + 1)}
    return sorted(p + x for p in prefixes for x in LETTERS if p + x not in prefixes)


def share_of_words(logits: Tensor, prompts: Sequence[str], generator: torch.Generator) -> float:
    """How often a rollout from these prompts ends in a word."""
    ends = (spell(rollout(logits, unspell(prompt), generator).final_state.tokens) for prompt in prompts)
    return sum(end in WORDS for end in ends) / len(prompts)


def draw(trajectory: Trajectory, path: Path) -> None:
    """Two pictures of one trajectory: the text before each action, and which node attends to which."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    def name(action: int) -> str:
        return {SPACE.bkspc: "<bkspc>", EOS: "<eos>", BOS: "<bos>"}.get(action) or LETTERS[action]

    def letter(column: int, row: int, text: str, color: str, face: str) -> None:
        box = {"boxstyle": "square,pad=0.3", "facecolor": face, "edgecolor": color}
        left.text(column, -row, text, family="monospace", size=15, ha="center", va="center", color=color, bbox=box)

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.9), width_ratios=(1.25, 1))
    before = spell(trajectory.initial)
    for t, state in enumerate(trajectory.states()):
        text = spell(state.tokens)
        for column, character in enumerate(text):
            letter(column, t, character, "black", "thistle" if column >= len(before) else "white")
        if len(text) < len(before):
            letter(len(text), t, before[-1], "crimson", "white")
            left.plot([len(text) - 0.32, len(text) + 0.32], [-t, -t], color="crimson", lw=2, zorder=5)
        if t < len(trajectory):
            action = trajectory.executed[t]
            color = "crimson" if action == SPACE.bkspc else "0.35"
            left.text(5.2, -t, f"→ {name(action)}", family="monospace", size=12, va="center", color=color)
        before = text
    left.text(5.2, 0.9, "action", size=10, color="0.5")
    left.text(-0.35, 0.9, f"text, given “{spell(trajectory.initial)}”", size=10, color="0.5")
    left.set(xlim=(-0.6, 7.6), ylim=(-len(trajectory) - 0.6, 1.3))
    left.axis("off")

    encoding = encode([trajectory])
    labels = [name(token) for token in encoding.tokens[0].tolist()]
    right.imshow(encoding.attend()[0], cmap="Purples", vmin=0, vmax=1.4)
    right.set_title("the same in one pass of a transformer:\nwhich node sees which", size=10, color="0.5")
    for set_ticks in (right.set_xticks, right.set_yticks):
        set_ticks(range(len(labels)), labels, family="monospace", size=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main() -> None:
    """Train the three objectives, print a recovery and a table, draw the recovery."""
    parser = argparse.ArgumentParser(prog="python examples/tabular.py", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="optimisation steps per objective (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--figure", type=Path, default=Path("out/tabular.png"), help="where to draw (default out/tabular.png)"
    )
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    torch.set_num_threads(1)

    policies = {}
    for name, objective in OBJECTIVES.items():
        print(f"training {name} for {args.steps} steps …", flush=True)
        policies[name] = train(objective, args.steps, args.seed)

    generator = torch.Generator().manual_seed(args.seed)
    print("\nGiven a wrong letter, the SequenceMatch policy continues like this:\n")
    for prompt in ("cao", "dod", "tet", "eo"):
        shown = rollout(policies["SequenceMatch"], unspell(prompt), generator)
        print(f"  {prompt:<5} → {shown.render(lambda token: LETTERS[token]):<34} = {spell(shown.final_state.tokens)}")
        if prompt == "cao":
            draw(shown, args.figure)

    wrong = mistakes()
    print(f"\n{'':<16}{'words written from scratch':>28}{'words after a wrong letter':>30}")
    for name, logits in policies.items():
        scratch = share_of_words(logits, [""] * 1000, generator)
        recovered = share_of_words(logits, wrong * (1000 // len(wrong) + 1), generator)
        print(f"{name:<16}{scratch:>28.1%}{recovered:>30.1%}")
    print(f"\nfigure: {args.figure}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; nothing was written")
