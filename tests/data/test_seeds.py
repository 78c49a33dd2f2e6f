"""Seeds by hash: the same for ever, and unrelated for neighbours."""

from sequencematch.data.seeds import hash_seed


def test_a_seed_by_hand() -> None:
    """For 1: "a" is 97, and 97 ^ 1 = 96. Each multiplication is modulo 2**64, each shift folds the high bits back."""
    mixed = 96 * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 % 2**64
    assert hash_seed("a", 1) == (mixed ^ (mixed >> 32)) >> 1


def test_purpose_number_and_order_all_count() -> None:
    calls = [("a", 1, 2), ("b", 1, 2), ("a", 2, 1), ("a", 1), ("a", 1, 2, 0), ("a", -1, 2), ("a", 2**64 + 3, 2)]
    seeds = [hash_seed(*call) for call in calls]  # type: ignore[arg-type]
    assert len(set(seeds)) == len(calls)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert hash_seed("a", 2**64 + 3, 2) == hash_seed("a", 3, 2)  # numbers count modulo 2**64


def test_neighbours_differ_in_half_of_their_bits() -> None:
    """63 bits of fair coins: 31.5 on average; the mean of 500 has a standard deviation of 0.18."""
    different = [(hash_seed("noise", 0, i) ^ hash_seed("noise", 0, i + 1)).bit_count() for i in range(500)]
    assert abs(sum(different) / 500 - 31.5) < 1
