"""Seeds by hash: one for every purpose and number, so that random numbers depend on nothing that ran before."""


def hash_seed(purpose: str, *numbers: int) -> int:
    """One 63-bit seed from what it is for and some numbers: neighbouring ones give unrelated streams."""
    mixed = int.from_bytes(purpose.encode())
    for number in numbers:
        mixed = (mixed ^ (number % 2**64)) * 0x9E3779B97F4A7C15 % 2**64
        mixed ^= mixed >> 29
        mixed = mixed * 0xBF58476D1CE4E5B9 % 2**64
        mixed ^= mixed >> 32
    return mixed >> 1
