"""Random numbers that are a function of what they are asked for, without a generator's state.

Philox-4x64 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), in
Python's integers: NumPy's has the same bits, and making one takes three times as long.
"""

ROUNDS = 10
MASK = 2**64 - 1
MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2⁻⁵³, that depends on nothing but seed and position.

    It is the first of NumPy's `Generator(Philox(key=seed, counter=[0, position, 0, 0]))`.
    """
    a, b, c, d = 1, position, 0, 0
    key, other_key = seed & MASK, 0
    for _ in range(ROUNDS):
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (
            (right >> 64) ^ b ^ key,
            right & MASK,
            (left >> 64) ^ d ^ other_key,
            left & MASK,
        )
        key, other_key = (key + KEY_STEPS[0]) & MASK, (other_key + KEY_STEPS[1]) & MASK
    return (a >> 11) * 2.0**-53
