"""A trajectory replayed on a Python list: slow, obvious, and independent of the library's own dynamics and encoding."""

from dataclasses import dataclass, field


@dataclass
class Replayed:
    """What one pass over a trajectory must look like: one entry per node, one per state."""

    tokens: list[int] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    attended: list[list[int]] = field(default_factory=list)
    visit: list[int] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)

    def push(self, stack: list[int], token: int) -> None:
        stack.append(len(self.tokens))
        self.tokens.append(token)
        self.position_ids.append(len(stack) - 1)
        self.attended.append(list(stack))

    def see(self, stack: list[int]) -> None:
        self.visit.append(stack[-1])
        self.states.append([self.tokens[node] for node in stack])


def replay(initial: tuple[int, ...], executed: tuple[int, ...], bkspc: int, floor: int, layout: str) -> Replayed:
    """Push and pop node numbers. In the paper's layout a backspace also replaces the new top by a copy of it."""
    result, stack = Replayed(), list[int]()
    for token in initial:
        result.push(stack, token)
    result.see(stack)
    for action in executed:
        if action != bkspc:
            result.push(stack, action)
        else:
            if len(stack) > floor:
                stack.pop()
            if layout == "paper":
                original = stack.pop()
                result.push(stack, result.tokens[original])
        result.see(stack)
    return result
