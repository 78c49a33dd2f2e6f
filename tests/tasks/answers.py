"""The oracle of the arithmetic tests: reads a question and works it out with Python's own numbers, and no sympy."""

import re
from fractions import Fraction

DIGITS = "0123456789"
SMALL_PRIMES = [n for n in range(2, 100_003) if all(n % d for d in range(2, int(n**0.5) + 1))]  # √10¹⁰ = 100,000


def in_base(number: int, base: int) -> str:
    digits = ""
    rest = abs(number)
    while rest or not digits:
        digits, rest = DIGITS[rest % base] + digits, rest // base
    return "-" * (number < 0) + digits


def sum_in_base(question: str) -> str:
    asked = re.fullmatch(r"In base (\d+), what is (-?\d+) ([+-]) (-?\d+)\?", question)
    assert asked, question
    base = int(asked[1])
    p, q = int(asked[2], base), int(asked[4], base)
    return in_base(p + q if asked[3] == "+" else p - q, base)


def product(question: str) -> str:
    """The product as a decimal, without zeros at its end."""
    number = r"(-?\d+(?:\.\d+)?)"
    ways = [
        rf"(?:(?:Calculate |Work out )?{number} ?\* ?{number}\.?)",
        rf"(?:(?:Multiply|Product of|What is the product of) {number} and {number}[.?])",
        rf"(?:(?:What is )?{number} times {number}\??)",
    ]
    asked = re.fullmatch("|".join(ways), question)
    assert asked, question
    p, q = (Fraction(text) for text in asked.groups() if text is not None)
    places = next(n for n in range(40) if 10**n % (p * q).denominator == 0)
    digits = str(abs(int(p * q * 10**places))).zfill(places + 1)
    point = len(digits) - places
    return "-" * (p * q < 0) + digits[:point] + "." * (places > 0) + digits[point:]


def prime_factors(question: str) -> str:
    asked = re.fullmatch(r"(?:What are|List) the prime factors of (\d+)[.?]", question)
    assert asked, question
    rest, found = int(asked[1]), []
    for prime in SMALL_PRIMES:
        if prime * prime > rest:
            break
        if rest % prime == 0:
            found.append(prime)
        while rest % prime == 0:
            rest //= prime
    return ", ".join(map(str, found + [rest] * (rest > 1)))


ANSWERS = {"add_or_sub_in_base": sum_in_base, "mul": product, "list_prime_factors": prime_factors}
