"""Masking by hand: what a transformer sees when tokens are deleted (Algorithm A; the paper's figure of the mask).

A policy is given "cao", deletes the o, writes an r and an e. Every token that is ever written is one position, a *node*. Node i
attends to node j if j was written before i and not deleted before i was written; nothing is written twice, and no node is removed.
"""

from sequencematch.core import ActionSpace, Trajectory, attend, encode

LETTERS, EOS, BOS = "caore", 5, 6
SPACE = ActionSpace(vocab_size=7, eos=EOS, bos=BOS)


def spelled(token: int) -> str:
    """A token as a letter."""
    return f"{LETTERS}■^⌫"[token]


def main() -> None:
    """Print nodes, when each was deleted, the mask, and what is chosen in each state."""
    prompt = [BOS, *map(LETTERS.index, "cao")]
    walk = Trajectory.rollout(SPACE, prompt, [SPACE.bkspc, *map(LETTERS.index, "re"), EOS])
    encoding = encode([walk])
    tokens, deleted_at = encoding.tokens[0].tolist(), encoding.deleted_at[0].tolist()

    print("node        ", *range(len(tokens)))
    print("token       ", *map(spelled, tokens))
    print("deleted at  ", *(n if n < len(tokens) else "-" for n in deleted_at), " (nodes written before its deletion)")
    print("position    ", *encoding.position_ids[0].tolist(), " (depth in the stack: r takes the place of o)")
    print("\nattends to  ", *map(spelled, tokens))
    for token, row in zip(tokens, attend(encoding.deleted_at)[0].tolist(), strict=True):
        print(f"          {spelled(token)} ", *("×" if seen else "." for seen in row))

    print("\nAfter a backspace the state is an earlier node, so deleting needs no forward pass:")
    states = [*walk.states()]
    for state, node, action in zip(states, encoding.visit[0].tolist(), walk.chosen, strict=False):
        written = "".join(map(spelled, state.tokens))
        print(f"  {written:5} at node {node}, chosen: {spelled(action)}")


if __name__ == "__main__":
    main()
