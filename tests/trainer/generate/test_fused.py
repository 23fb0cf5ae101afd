from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import native
from native.decode.packed import KINDS, why_not
from trainer.config.model import ModelConfig
from trainer.generate.network import Network, of_model
from trainer.generate.pages import Pages
from trainer.generate.request import Fed
from trainer.generate.sequence import CachedSequence, Part, step_of
from trainer.model.gpt import GPT

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

PLAIN = ModelConfig(layers=3, hidden=48, heads=4, sequence=64, vocab=301)
MODELS = {
    "gpt2": PLAIN,
    "exact gelu, parallel": replace(PLAIN, rotary=True, parallel_residual=True, activation="gelu", heads=3),
    "groups, head norms": replace(
        PLAIN, rotary=True, query_groups=2, swiglu=True, norm="rms", bias="qkv", tied=False, qk_norm=True
    ),
    "four norms, window": replace(
        PLAIN, rotary=True, sandwich_norms=True, swiglu=True, norm="rms", bias="none", window=10
    ),
}


def in_two_steps(network: Network, ids: list[int]) -> torch.Tensor:
    """Return the logits of all tokens, the last 15 of them computed over the cache."""
    pages, sequence = Pages(8), CachedSequence()
    sequence.feed([Fed(number, at) for at, number in enumerate(ids)])
    sequence.make_room(len(ids), pages, network)
    parts = []
    for begin, end in ((0, len(ids) - 15), (len(ids) - 15, len(ids))):
        step = step_of([Part(sequence, begin, end, True)], False, network.config.window)
        parts.append(network.logits(step).clone())
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_one_call_computes_what_the_modules_do(name: str, kind: str) -> None:
    torch.manual_seed(3)
    model = GPT(MODELS[name], native.choose("cpu")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    ids = torch.randint(0, 300, (40,)).tolist()
    network = of_model(model, 8, kind)
    assert network.fused is not None
    found = in_two_steps(network, ids)
    network.fused = None
    by_modules = in_two_steps(network, ids)
    # In bf16 and 8 bits a last bit of an activation may decide how it is rounded.
    assert torch.allclose(found, by_modules, atol=1e-4 if kind == "fp32" else 0.2)
    if kind == "fp32":
        assert torch.allclose(found, model(torch.tensor([ids]))[0], atol=1e-4)
