"""The thread that computes: which requests begin together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from trainer.checkpoint.store import verify
from trainer.corpus.tokenizer import Tokenizer
from trainer.generate.decoder import Decoder, Text
from trainer.generate.loading import load_model
from trainer.generate.network import of_model
from trainer.generate.sampling import Sampling


def test_requests_that_follow_each_other_closely_begin_in_the_same_step(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    from trainer.serve import runner

    monkeypatch.setattr(runner, "GAP", 5.0)
    monkeypatch.setattr(runner, "TOGETHER", 1.0)
    decoder = Decoder(of_model(load_model(verify(model)), 64), Tokenizer.load(model), 64)
    worker, sampling = runner.Runner(decoder, 8), Sampling(5, temperature=0, ignore_end=True)

    async def ask() -> list[Text]:
        streams = []
        for prompt in ("one two", "five", "six seven eight"):
            sink = Text(decoder.tokenizer)
            request = decoder.continuation(decoder.ids_of(prompt), sampling, sink)
            streams += worker.submit([(request, sink)], in_pieces=False)
            await asyncio.sleep(0.05)
        return [await stream.text() for stream in streams]

    worker.start()
    try:
        texts = asyncio.run(ask())
    finally:
        worker.stop()
    assert [len(text.tokens) for text in texts] == [5, 5, 5]
    # One step has the three prompts, and each further one a token of each text.
    assert decoder.batcher.steps == 5
