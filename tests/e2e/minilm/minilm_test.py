"""A real sentence model whose attention the server computes: python minilm_test.py.

Sentences of different lengths are embedded three ways: with attention in NumPy, with the server's
attention on the padded batch (BS3HD with lengths), and on the ragged one (T3HD, not one padded
token). The embeddings agree, and sentences that mean the same are closer than any others.
"""

import math
import pathlib
import sys
import unittest

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from encoder import Encoder, embed, erf
from server_process import ServerProcess

import attnd

# Each pair says one thing twice.
PARAPHRASES = (
    ("A man is playing a guitar.", "Someone strums a guitar on the stage of a small club."),
    (
        "The company's profits fell sharply in the last quarter of the year.",
        "Earnings of the firm dropped a lot over the past three months.",
    ),
    ("How do I reset my password?", "I forgot my login password and need a new one."),
    ("It will rain tomorrow.", "The forecast for tomorrow is wet weather, with showers all day."),
    (
        "The cat slept on the sofa all afternoon.",
        "All afternoon long, the kitten was asleep on the couch.",
    ),
    (
        "Researchers found a treatment for diabetes that lowers blood sugar without injections.",
        "Scientists discovered a diabetes therapy which needs no needles.",
    ),
    ("Boil the pasta for ten minutes.", "Cook the noodles in boiling water for about 10 minutes."),
)
SENTENCES = [sentence for pair in PARAPHRASES for sentence in pair]
TOLERANCE = 1e-4


def numpy_attention(lengths):
    """Attention of a padded batch: qkv [b, s, 3, h, d] -> [b, s, h, d], padded rows 0."""

    def attention(qkv):
        out = np.zeros_like(qkv[:, :, 0])
        for i, length in enumerate(lengths):
            q, k, v = (qkv[i, :length, slot].swapaxes(0, 1) for slot in range(3))  # [h, length, d]
            logits = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[i, :length] = (weights @ v).swapaxes(0, 1)
        return out

    return attention


def server_attention(client, layout, lengths, calls):
    """The same by the server; appends to `calls` how each call ran."""
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths)))

    def attention(qkv):
        result = client.forward(layout, qkv=qkv, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        calls.append((qkv.shape, result.info))
        return result.out

    return attention


def embed_padded(encoder, sentences, attention):
    """Embeddings through one [b, s] batch, padded with zeros to the longest sentence."""
    lengths = [len(tokens) for tokens in sentences]
    batch = np.zeros((len(sentences), max(lengths)), dtype=np.int64)
    for row, tokens in zip(batch, sentences, strict=True):
        row[: len(tokens)] = tokens
    positions = np.broadcast_to(np.arange(batch.shape[1]), batch.shape)
    hidden = encoder.encode(batch, positions, attention)
    return embed([row[:length] for row, length in zip(hidden, lengths, strict=True)])


def embed_ragged(encoder, sentences, attention):
    """Embeddings through one [t] array: the sentences end to end."""
    positions = np.concatenate([np.arange(len(tokens)) for tokens in sentences])
    hidden = encoder.encode(np.concatenate(sentences), positions, attention)
    ends = np.cumsum([len(tokens) for tokens in sentences])
    return embed(np.split(hidden, ends[:-1]))


class MiniLmTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.encoder = Encoder()
        cls.sentences = cls.encoder.tokenize(SENTENCES)
        lengths = [len(tokens) for tokens in cls.sentences]
        cls.padded_calls, cls.ragged_calls = [], []
        cls.local = embed_padded(cls.encoder, cls.sentences, numpy_attention(lengths))
        with ServerProcess() as server, attnd.Client(server.address, timeout=60) as client:
            cls.padded = embed_padded(
                cls.encoder,
                cls.sentences,
                server_attention(client, "BS3HD", lengths, cls.padded_calls),
            )
            cls.ragged = embed_ragged(
                cls.encoder,
                cls.sentences,
                server_attention(client, "T3HD", lengths, cls.ragged_calls),
            )
        print_table(cls)

    def test_the_batch_has_sentences_of_different_lengths(self):
        lengths = {len(tokens) for tokens in self.sentences}
        self.assertGreaterEqual(len(self.sentences), 12)
        self.assertGreaterEqual(len(lengths), 6)

    def test_the_server_computed_every_layer_on_either_layout(self):
        tokens = sum(len(tokens) for tokens in self.sentences)
        longest = max(len(tokens) for tokens in self.sentences)
        for calls, shape in (
            (self.padded_calls, (len(self.sentences), longest, 3, 12, 32)),
            (self.ragged_calls, (tokens, 3, 12, 32)),
        ):
            self.assertEqual([call[0] for call in calls], [shape] * self.encoder.num_layers)
            self.assertEqual({call[1].backend for call in calls}, {"cpu"})

    def test_embeddings_agree_with_local_attention(self):
        np.testing.assert_allclose(self.padded, self.local, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(self.ragged, self.local, rtol=0, atol=TOLERANCE)

    def test_paraphrases_score_above_all_other_sentences(self):
        for name in ("local", "padded", "ragged"):
            embeddings = getattr(self, name)
            scores = embeddings @ embeddings.T
            for first in range(0, len(SENTENCES), 2):
                pair = [first, first + 1]
                others = np.delete(scores[pair], pair, axis=1)
                with self.subTest(attention=name, pair=PARAPHRASES[first // 2]):
                    self.assertGreater(scores[first, first + 1], others.max() + 0.1)

    def test_erf_is_exact(self):
        x = np.concatenate((np.linspace(-7, 7, 9973), [0.0, -0.0, 1e-30, 40.0, -np.inf, np.inf]))
        expected = np.array([math.erf(value) for value in x])
        np.testing.assert_allclose(erf(x), expected, rtol=0, atol=1e-10)


def print_table(test):
    """What the README shows."""
    for layout, calls, embeddings in (
        ("BS3HD", test.padded_calls, test.padded),
        ("T3HD", test.ragged_calls, test.ragged),
    ):
        shape, info = calls[0]
        error = np.abs(embeddings - test.local).max()
        print(
            f"{layout:5} {len(calls)} layers of qkv {list(shape)} by {info.backend}/{info.engine}: "
            f"embeddings within {error:.1e} of local attention"
        )
    scores = test.ragged @ test.ragged.T
    print(f"\n{'paraphrase':>10} {'next best':>10}   sentence (tokens)")
    for row, sentence in enumerate(SENTENCES):
        partner = row ^ 1
        others = np.delete(scores[row], [row, partner])
        tokens = len(test.sentences[row])
        print(f"{scores[row, partner]:10.3f} {others.max():10.3f}   {sentence} ({tokens})")


if __name__ == "__main__":
    unittest.main(verbosity=2)
