"""What the processor can do at best: one large product, and how many FLOPs a model's tokens are worth.

Owns both figures' definitions. The product is [1024, 1536] × [1536, 1536] through `torch.nn.functional.linear`,
without bias. Called by `benchmarks.duels`.
"""

from collections.abc import Iterable

from transformers import PretrainedConfig

from benchmarks.turns import Pass

_ROWS, _WIDTH = 1024, 1536
LINEAR_FLOP = 2 * _ROWS * _WIDTH * _WIDTH
LINEAR_NAME = f"F.linear {_ROWS}×{_WIDTH}×{_WIDTH}"


def linear_pass(dtype: str) -> Pass:
    """Runs the product once. `dtype` is torch's name of a number format."""
    import torch

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, _WIDTH, generator=generator).to(getattr(torch, dtype))
    weight = torch.randn(_WIDTH, _WIDTH, generator=generator).to(getattr(torch, dtype))

    def run() -> None:
        with torch.inference_mode():
            torch.nn.functional.linear(hidden, weight)

    return run


def model_flop(config: PretrainedConfig, lengths: Iterable[int]) -> int:
    """FLOPs of a BERT over sequences of these lengths: linear layers and attention's two products, of real tokens.

    Per layer and token 2 × (4 H² + 2 H I) for query, key, value, output and the two of the feed-forward network, and
    4 × L × H for the products of a sequence of L tokens. Not counted: embeddings, softmax, norms, activations, pooling.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    per_token = 2 * (4 * hidden * hidden + 2 * hidden * inner)
    layers: int = config.num_hidden_layers
    return sum(layers * length * (per_token + 4 * length * hidden) for length in lengths)
