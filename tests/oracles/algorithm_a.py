"""Algorithm A line by line as the paper prints it (App. A): our encoding is held against it, and timed beside it."""

import numpy as np
from numpy.typing import NDArray


def printed_algorithm_a(a: list[int], bkspc: int) -> tuple[list[int], NDArray[np.bool_], list[int]]:
    """Inputs x, mask m and positions p of one action sequence, whose first action is `<bos>`   (App. A, line by line).

    The loop is printed as i = 0, …, L and must end at L − 1. The labels y are announced and never assigned.
    """
    length = len(a)
    m = np.zeros((length, length), dtype=np.bool_)
    p = [0] * length
    x = list(a)
    c = 0
    d = 0
    for i in range(length):
        m[i] = m[max(i - 1, 0)]
        if a[i] == bkspc:
            m[i, c] = False
            m[i, d] = False
            m[i, i] = True
            x[i] = x[c]
            p[i] = p[c]
            d = i
            (alive,) = m[i, 0:c].nonzero()
            c = int(alive[-1]) if len(alive) else 0
        else:
            m[i, i] = True
            d = d + 1
            (alive,) = m[i, c + 1 :].nonzero()
            c = c + 1 + int(alive[0]) if len(alive) else 0
            p[i] = p[d - 1] + 1
        if i == 0:
            c = 0
            d = 0
        if i == 1:
            c = 0
            d = 1
    return x, m, p
