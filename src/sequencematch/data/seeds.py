"""Seeds by hash: a resumed run, or another process, draws the same random numbers."""


def hash_seed(purpose: str, *numbers: int) -> int:
    """A 63-bit seed from a purpose and some numbers. Neighbouring numbers give unrelated random streams."""
    mixed = int.from_bytes(purpose.encode())
    for number in numbers:
        mixed = (mixed ^ (number % 2**64)) * 0x9E3779B97F4A7C15 % 2**64
        mixed ^= mixed >> 29
        mixed = mixed * 0xBF58476D1CE4E5B9 % 2**64
        mixed ^= mixed >> 32
    return mixed >> 1
