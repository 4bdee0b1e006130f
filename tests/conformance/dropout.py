"""Which cells dropout keeps, in NumPy: the service's published rule, written once more.

Philox4x32-10 turns a counter of four 32-bit words into four random ones under a key of two. The key
of a sequence and head comes from two calls: of the offset under the seed, then of (sequence, head)
and the last two words under the first two. Its first two words are the key. Cell (row, key j) is
word j % 4 of the call whose counter is j // 4 and row, 64 bits each, low word first; it is kept
where the word is at least probability * 2^32.
"""

import numpy as np

WORD = 0xFFFFFFFF


def philox(counter, key):
    """Four arrays (or numbers) and two numbers -> four arrays of uint64 below 2^32."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (right >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            right & np.uint64(WORD),
            (left >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            left & np.uint64(WORD),
        )
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def _words(number: int):
    return number & WORD, (number >> 32) & WORD


def keep_mask(probability: float, seed: int, offset: int, sequence: int, head: int, rows: int, keys: int):
    """-> bool [rows, keys]."""
    a = [int(word) for word in philox((*_words(offset), 0, 0), _words(seed))]
    b = [int(word) for word in philox((sequence, head, a[2], a[3]), (a[0], a[1]))]
    row, four = np.meshgrid(np.arange(rows), np.arange((keys + 3) // 4), indexing="ij")
    zero = np.zeros_like(row)
    words = np.stack(philox((four, zero, row, zero), (b[0], b[1])), axis=-1)
    return words.reshape(rows, words.shape[1] * 4)[:, :keys] >= int(probability * 2**32 + 0.5)
