"""The network of a device on tensors of a CPU with plain torch: what it shares with every device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import native
from native.registry import REFERENCE
from tests.support.cpu_graph import RecordingDevice
from tests.trainer.generate.test_batcher import END, SHAPE, SHAPES, Collector, run
from trainer.config.model import ModelConfig
from trainer.config.rope import RopeConfig
from trainer.corpus.tokenizer import Tokenizer, train_tokenizer
from trainer.device import Device
from trainer.engine.passes import Model
from trainer.evaluate.request import Request as Scored
from trainer.evaluate.scorer import Scorer
from trainer.generate.batcher import Batcher
from trainer.generate.blanks import Filling
from trainer.generate.decoder import Text
from trainer.generate.device_network import DeviceNetwork
from trainer.generate.network import device_network, empty_model, of_model, reader_of
from trainer.generate.on_device import fill
from trainer.generate.request import Continuation, Request
from trainer.generate.sampling import Sampling
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.samples.glm_windows import GlmTokens

MODELS: dict[str, ModelConfig] = {
    **SHAPES,
    "experts": replace(SHAPE, rotary=True, swiglu=True, experts=4, top_k=2, shared_ffn=32, tied=False),
    "yarn": replace(SHAPE, rotary=True, rope=RopeConfig(scaling="yarn", factor=4.0, original=32)),
}


def model_of(name: str) -> GPT:
    torch.manual_seed(5)
    model = GPT(MODELS[name], native.choose("cpu")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.02
    return model


def on_device(model: Model, pages: int, kind: str = "fp32", captures: bool = True) -> DeviceNetwork:
    """Return the network of a device; `captures`: with graphs, as on CUDA."""
    ops, device = native.choose("cpu", REFERENCE), RecordingDevice("cpu")
    own = device_network(model.config, reader_of(model), kind, pages, device, ops=ops)
    network = DeviceNetwork(own, device)
    network.captures = captures and not model.config.experts
    return network


def replays(network: DeviceNetwork) -> list[int]:
    assert isinstance(network.device, RecordingDevice)
    return [graph.replays for graph in network.device.graphs]


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(2)
    return [torch.randint(1, 300, (size,), generator=random).tolist() for size in (1, 40, 17, 100, 16, 3)]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_the_cpus_own_kernels(name: str) -> None:
    model = model_of(name)
    greedy = Sampling(max_tokens=12, temperature=0.0, logprobs=2)
    orders = [(ids, greedy) for ids in prompts()]
    network = on_device(model, 200)
    with torch.inference_mode():
        found, expected = (run(each, orders) for each in (network, of_model(model, 200)))
    # Six texts, rounded up to eight, for 12 tokens: the prompts give the first, one step runs op by op.
    assert replays(network) == ([] if MODELS[name].experts else [10])
    assert [sink.ids for sink in found] == [sink.ids for sink in expected]
    for own, other in zip(found, expected, strict=True):
        pairs = zip(own.drawn, other.drawn, strict=True)
        assert all(mine.logprob == pytest.approx(theirs.logprob, abs=2e-4) for mine, theirs in pairs)


def test_beams_share_pages_and_a_prompt_is_scored() -> None:
    model = model_of("rotary")
    beams = Sampling(max_tokens=10, beams=3)
    texts, scores = [], []
    for network in (on_device(model, 200), of_model(model, 200)):
        texts.append([sink.ids for sink in run(network, [(ids, beams) for ids in prompts()])])
        batcher, sink = Batcher(network, 200), Collector()
        ids = prompts()[3]
        course = Continuation(ids, Sampling(max_tokens=0), [END], SHAPE.sequence)
        batcher.submit(Request(course, Sampling(max_tokens=0), sink, ids, score_prompt=True))
        while not batcher.idle:
            batcher.step()
        scores.append([drawn.logprob for drawn in sink.prompt])
    assert texts[0] == texts[1]
    assert len(scores[0]) == 99 and scores[0] == pytest.approx(scores[1], abs=2e-4)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["gpt2", "window", "experts"])
def test_narrow_weights_are_stored_and_computed_as_such(name: str, kind: str) -> None:
    model = model_of(name)
    network = on_device(model, 40, kind)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    assert {pages.dtype for layer in network.cache.layers for pages in layer} == {narrow}
    held = {tensor.dtype for tensor in network.model.parameters() if tensor.dim() == 3}
    assert held == ({narrow} if name == "experts" else set())
    assert network.model.head.packed.data.dtype == narrow  # type: ignore[union-attr]
    ids = prompts()[3]
    one = Sampling(max_tokens=1, temperature=0.0, logprobs=1)
    (found,), (exact,) = (run(which, [(ids, one)], 40) for which in (network, of_model(model, 40)))
    assert found.drawn[0].logprob == pytest.approx(exact.drawn[0].logprob, abs=0.1)


def test_a_seed_gives_the_same_text_whatever_else_is_in_the_batch() -> None:
    network = on_device(model_of("llama"), 200)
    drawing = [Sampling(max_tokens=12, temperature=1.5, top_k=40, seed=seed) for seed in range(6)]
    together = run(network, list(zip(prompts(), drawing, strict=True)))
    for ids, sampling, sink in zip(prompts(), drawing, together, strict=True):
        (alone,) = run(network, [(ids, sampling)])
        assert alone.ids == sink.ids


def test_each_parameter_is_read_once_and_not_kept_wide() -> None:
    """A model of many parameters never has two of them in fp32."""
    model, read = model_of("gpt2"), list[str]()
    inner = reader_of(model)

    def counted(name: str) -> torch.Tensor:
        read.append(name)
        return inner(name)

    ops = native.choose("cpu", REFERENCE)
    network = device_network(model.config, counted, "bf16", 4, Device("cpu"), ops=ops)
    assert sorted(read) == sorted(name for name, _ in model.named_parameters())
    assert not any(parameter.is_meta for parameter in network.model.parameters())


def test_a_glm_fills_in_blanks_as_on_a_cpu(tmp_path: Path) -> None:
    """A source is seen by all of its tokens; two blanks are filled in next to another text."""
    train_tokenizer(iter(["one two three four five six. " * 12] * 12), 300, tmp_path / "tokenizer.json")
    words = Tokenizer.load(tmp_path / "tokenizer.json")
    tokens = GlmTokens.above(words.vocab, words.eod)
    torch.manual_seed(4)
    config = ModelConfig("glm", layers=2, hidden=48, heads=4, sequence=64, vocab=tokens.vocab, init_std=0.2)
    model = GLM(config, native.choose("cpu")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.2
    found = []
    for network in (on_device(model, 60), of_model(model, 60)):
        batcher, courses = Batcher(network, 60), list[Filling]()
        for prompt in ("one [MASK] four [sMASK]", "two three four five", "six [MASK]"):
            sampling = Sampling(max_tokens=6, temperature=0.0)
            courses.append(Filling(config, words, tokens, prompt, sampling))
            batcher.submit(Request(courses[-1], sampling, Text(words)))
        while not batcher.idle:
            batcher.step()
        found.append([course.text() for course in courses])
    assert found[0] == found[1] and len(set(found[0])) == 3


def test_a_model_for_scoring_computes_what_the_cpus_does() -> None:
    for name in ("llama", "experts", "neox"):
        model = model_of(name)
        other = empty_model(model.config, ops=native.choose("cpu", REFERENCE))
        fill(other, reader_of(model), "fp32", Device("cpu"))
        texts = prompts()
        requests = [Scored(tuple(ids[:1]), tuple(ids[1:] or [4])) for ids in texts]
        own, expected = (Scorer(which).score(requests) for which in (other, model))
        assert [one.log_likelihood for one in own] == pytest.approx(
            [one.log_likelihood for one in expected], rel=1e-5
        )


def test_tokens_that_cannot_be_captured_are_computed_op_by_op_after_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    orders = [(ids, Sampling(max_tokens=8, temperature=0.0)) for ids in prompts()]
    expected = run(on_device(model, 200, captures=False), orders)
    network = on_device(model, 200)
    turning = network._sight

    def reading(positions: torch.Tensor) -> object:
        positions.nonzero()
        return turning(positions)

    monkeypatch.setattr(network, "_sight", reading)
    with pytest.warns(RuntimeWarning, match="computed op by op, not as a captured graph: .*nonzero") as told:
        found = run(network, orders)
    assert len([each for each in told if "op by op" in str(each.message)]) == 1
    assert [sink.ids for sink in found] == [sink.ids for sink in expected]
    assert replays(network) == [0]


def test_each_number_of_texts_and_pages_has_its_own_graph() -> None:
    model = model_of("gpt2")
    network, plain = on_device(model, 200), on_device(model, 200, captures=False)
    results = []
    for each in (network, plain):
        sinks = []
        # One text, then five, then three of them end early; texts of one page more than a power of two.
        for count, most in ((1, 6), (5, 9), (2, 40)):
            orders = [
                (ids, Sampling(max_tokens=most - i, temperature=0.0))
                for i, ids in enumerate(prompts()[:count])
            ]
            sinks += run(each, orders)
        results.append([sink.ids for sink in sinks])
    assert results[0] == results[1]
    assert set(network.steps) == {(1, 16), (8, 16), (4, 16), (2, 16)} and sum(replays(network)) > 40


def test_prompts_of_similar_lengths_are_one_call_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("window")
    network = on_device(model, 400)
    calls, attention = [], network.model.blocks["0"].attention.cache.ops.attention  # type: ignore[union-attr]

    def counted(q: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        calls.append(tuple(q.shape[:1] + q.shape[2:3]))
        return attention(q, *rest, **named)

    monkeypatch.setattr(network.cache.ops, "attention", counted)  # type: ignore[attr-defined]
    random = torch.Generator().manual_seed(9)
    lengths = (20, 21, 19, 60, 58, 3)
    texts = [torch.randint(1, 300, (length,), generator=random).tolist() for length in lengths]
    orders = [(ids, Sampling(max_tokens=3, temperature=0.0)) for ids in texts]
    found = run(network, orders)
    assert calls == [(2, 60), (3, 21), (1, 3)] * model.config.layers
    expected = run(of_model(model, 400), orders)
    assert [sink.ids for sink in found] == [sink.ids for sink in expected]
