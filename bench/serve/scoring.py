"""`python -m bench.serve.scoring`: compare `eval` with lm-eval's `hf` model in scoring texts with the same weights.

It needs transformers and lm-eval. Both score the same requests in turn: short texts with one last word (as in LAMBADA),
and whole windows of 1,024 tokens (as in WikiText). It prints one JSON line for each; the scores must agree.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import native
from bench.field import Option, read_options
from trainer.config.model import ModelConfig
from trainer.config.model_sizes import SIZES
from trainer.evaluate.packed_scorer import PackedScorer, why_not
from trainer.evaluate.request import Request
from trainer.evaluate.scorer import Scorer
from trainer.model.gpt import GPT
from trainer.weights.families.registry import FAMILIES
from trainer.weights.lazy import in_memory
from trainer.weights.rules import rules_of, to_ours

CONFIG = SIZES["gpt2-124M"]
ROUNDS = 3


def requests(texts: int, windows: int) -> dict[str, list[Request]]:
    """Return requests for each kind of task; short texts have 60 to 110 tokens, as in LAMBADA."""
    draw = random.Random(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(CONFIG.vocab) for _ in range(count))

    short = [Request(ids(draw.randrange(55, 110)), ids(draw.randrange(1, 4))) for _ in range(texts)]
    return {"lambada": short, "wikitext": [Request(ids(1), ids(1024)) for _ in range(windows)]}


def take_weights(model: GPT, config: ModelConfig, peer: Any) -> None:
    """Give our GPT the weights of a GPT-2 of transformers."""
    family, parameters = FAMILIES["gpt2"], dict(model.named_parameters())
    held = {
        name.removeprefix(family.prefixes[0]): in_memory(tensor.detach().clone())
        for name, tensor in peer.named_parameters()
    }
    with torch.no_grad():
        for rule in rules_of(family.rules, config.layers, parameters):
            whole = to_ours(rule, config, held).whole()
            parameters[rule.ours][: len(whole)].copy_(whole)


def scored(scorer: Scorer | PackedScorer, wanted: list[Request]) -> list[float]:
    """Return our log likelihood of each request."""
    found = [0.0] * len(wanted)
    for batch in scorer.batches(wanted):
        scores = scorer.score([wanted[at] for at in batch])
        for at, score in zip(batch, scores, strict=True):
            found[at] = score.log_likelihood
    return found


def judge(peer: Any) -> Callable[[list[Request]], list[float]]:
    """Return a function that scores with lm-eval, in its usual batches of one."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {f"t{number}": number for number in range(CONFIG.vocab)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="t0")), eos_token="t0"
    )
    model = HFLM(pretrained=peer, tokenizer=tokenizer, batch_size=1, max_length=1024, device="cpu")

    def score(wanted: list[Request]) -> list[float]:
        rows = [(("", str(at)), list(entry.context), list(entry.target)) for at, entry in enumerate(wanted)]
        return [likelihood for likelihood, _ in model._loglikelihood_tokens(rows, disable_tqdm=True)]

    return score


def main() -> None:
    arguments = read_options(
        __doc__,
        threads=2,
        cpu=Option(False, "measure processor time, for a busy machine"),
        texts=48,
        windows=3,
    )
    torch.set_num_threads(arguments.threads)
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    peer = GPT2LMHeadModel(GPT2Config()).eval()
    clock = time.process_time if arguments.cpu else time.perf_counter
    model, theirs = GPT(CONFIG, native.choose("cpu")).eval(), judge(peer)
    take_weights(model, CONFIG, peer)
    reason = why_not(model)
    scorer: Scorer | PackedScorer = Scorer(model) if reason else PackedScorer(model)
    for task, wanted in requests(arguments.texts, arguments.windows).items():
        tokens, seconds = sum(entry.length for entry in wanted), (list[float](), list[float]())
        answers: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for at, score in enumerate((lambda rows: scored(scorer, rows), theirs)):
                began = clock()
                answers[at] = score(wanted)
                seconds[at].append(clock() - began)
        rates = [tokens / statistics.median(entry) for entry in seconds]
        worst = max(abs(own - other) / abs(other) for own, other in zip(*answers, strict=True))
        line = {
            "task": task,
            "threads": arguments.threads,
            "cpu_seconds": arguments.cpu,
            "tokens_per_second": rates[0],
            "lm_eval": rates[1],
            "ratio": rates[0] / rates[1],
            "largest_difference": worst,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
