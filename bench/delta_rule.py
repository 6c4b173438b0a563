"""Time of a layer's gated delta rule (convolution, recurrence, states), compared with transformers' PyTorch functions
on the same inputs. Prints a table in Markdown.

    python -m bench.delta_rule --out bench/results/delta-rule.json

One thread; processor time, so that other processes matter little. Single tokens go through the states of 24 layers in
turn, as in a step of a model: one layer's states alone would stay in the processor's caches.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from bench.measuring import Work, like_an_instance, report, seconds_in_turns
from triptych.layers.delta_rule.base import DeltaBatch, DeltaHeads, DeltaRule, DeltaState, DeltaWeights
from triptych.layers.delta_rule.compiled import cpu_delta_rule
from triptych.layers.delta_rule.reference import PyTorchDeltaRule
from triptych.layers.native import kernels
from triptych.layers.pointwise import gated_norm
from triptych.measure.machine import machine

HEADS = {"16 value heads": DeltaHeads(16, 16, 128, 128), "32 value heads": DeltaHeads(16, 32, 128, 128)}
PROMPTS = (64, 256, 1024)
LAYERS = 24
EPS = 1e-6


class Layers:
    """Layers with the same weights and inputs, and states of their own."""

    def __init__(self, heads: DeltaHeads, tokens: int, layers: int) -> None:
        torch.manual_seed(0)
        rates, biases = torch.empty(heads.value_heads).uniform_(0.01, 16).log(), torch.ones(heads.value_heads)
        self.weights = DeltaWeights.of(heads, torch.randn(heads.channels, 1, 4) / 2, rates, biases)
        self.mixed = torch.randn(tokens, heads.channels)
        self.a, self.b = torch.randn(2, tokens, heads.value_heads)
        self.states = [DeltaState.allocate(heads, 1, torch.float32, torch.device("cpu")) for _ in range(layers)]
        for state in self.states:
            state.recurrent.normal_()
            state.conv.normal_()
        self.padded = [torch.zeros(1, heads.channels, 4) for _ in self.states]  # transformers keeps four columns

    def ours(self, rule: DeltaRule) -> Work:
        batch = DeltaBatch([len(self.mixed)], [0], [False])

        def work() -> None:
            for state in self.states:
                rule(self.mixed, self.a, self.b, self.weights, state, batch)

        return work

    def theirs(self) -> None:
        """The same operations as ``Qwen3_5GatedDeltaNet``."""
        heads, taps, single = self.weights.heads, self.weights.taps.T.contiguous(), len(self.mixed) == 1
        rule = hf.torch_recurrent_gated_delta_rule if single else hf.torch_chunk_gated_delta_rule
        dims = heads.key_dim, heads.key_dim, heads.value_dim
        for state, padded in zip(self.states, self.padded, strict=True):
            if single:
                mixed = hf.causal_conv1d_update(self.mixed.T[None], padded, taps, None, "silu")
            else:
                mixed = hf.causal_conv1d_fn(self.mixed.T[None], taps, None, activation="silu")
            parts = mixed.mT.split(heads.segments, dim=-1)
            query, key, value = (part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, dims, strict=True))
            decay = -self.weights.rates * F.softplus(self.a + self.weights.dt_bias)
            _, after = rule(
                query, key, value, g=decay[None], beta=self.b.sigmoid()[None], initial_state=state.recurrent,
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            state.recurrent.copy_(after)


def rule_ms(heads: DeltaHeads, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return each method's milliseconds per layer, median and minimum."""
    layers = Layers(heads, tokens, LAYERS if tokens == 1 else 1)
    ways: dict[str, Work] = {
        "compiled": layers.ours(cpu_delta_rule()),
        "PyTorch": layers.ours(PyTorchDeltaRule()),
        "transformers": layers.theirs,
    }
    return _summary(ways, rounds, len(layers.states))


def norm_ms(heads: DeltaHeads, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """As ``rule_ms``, of the gated norm that follows."""
    values, gates = torch.randn(2, tokens, heads.value_heads, heads.value_dim)
    theirs = hf.Qwen3_5RMSNormGated(heads.value_dim, eps=EPS)

    def by_transformers() -> Tensor:
        normed: Tensor = theirs(values.view(-1, heads.value_dim), gates.view(-1, heads.value_dim))
        return normed

    ways: dict[str, Work] = {
        "compiled": lambda: gated_norm(values, gates.flatten(1), theirs.weight, EPS),
        "transformers": by_transformers,
    }
    return _summary(ways, rounds, 1)


def _summary(ways: dict[str, Work], rounds: int, parts: int) -> dict[str, dict[str, float]]:
    found = seconds_in_turns(ways, rounds, time.thread_time)
    return {
        name: {
            "median": round(1e3 * statistics.median(seconds) / parts, 3),
            "minimum": round(1e3 * min(seconds) / parts, 3),
        }
        for name, seconds in found.items()
    }


def markdown(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return a table: a line per step, milliseconds as median (minimum)."""
    names = ["compiled", "PyTorch", "transformers"]
    lines = [["step", *names], ["---"] * (1 + len(names))]
    for heads, steps in found.items():
        for step, ways in steps.items():
            cells = [f"{ways[name]['median']} ({ways[name]['minimum']})" if name in ways else "–" for name in names]
            lines.append([f"{heads}, {step}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS))
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    like_an_instance(threads=1)
    layer_ms: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        for name in options.heads:
            heads, steps = HEADS[name], layer_ms.setdefault(name, {})
            steps["one token"] = rule_ms(heads, 1, options.rounds)
            for tokens in options.prompts:
                steps[f"{tokens} tokens"] = rule_ms(heads, tokens, options.rounds)
            steps["gated norm of one token"] = norm_ms(heads, 1, 20 * options.rounds)
            steps[f"gated norm of {options.prompts[-1]} tokens"] = norm_ms(heads, options.prompts[-1], options.rounds)
    found = {"machine": machine(), "kernels": kernels().description, "options": {"threads": 1}, "layer_ms": layer_ms}
    report(found, options.out)
    print(f"\n{markdown(layer_ms)}")


if __name__ == "__main__":
    main()
