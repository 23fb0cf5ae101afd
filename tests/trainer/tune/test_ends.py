"""Which tokens end a text and a chat: from the files next to the tokenizer, through a training, to its export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from clusterctl.wire.requests import ExportRequest
from tests.support import weights
from tests.support.tuning import CHATML, WORDS, completion, config_for, learn, lines
from trainer.corpus.tokenizer import Tokenizer, train_tokenizer
from trainer.generate.decoder import Text
from trainer.generate.loading import open_decoder
from trainer.generate.request import End
from trainer.generate.sampling import Sampling
from trainer.plan.resolve import read_config
from trainer.side_files import SideFiles
from trainer.tune.chat import ChatData
from trainer.tune.pairs import PairData
from trainer.weights.convert import export_weights, import_weights

EOT, IM_END = "<|endoftext|>", "<|im_end|>"


def tokenizer_in(folder: Path, eos: str, template: Any = CHATML, **generation: Any) -> Tokenizer:
    """Write a tokenizer as Qwen's, which has an end of documents and an end of messages."""
    text = " ".join(["user assistant system say Repeat.", *WORDS]) + "!\n"
    train_tokenizer(iter([text] * 20), 300, folder / "tokenizer.json", overwrite=True)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["<|im_start|>", IM_END])
    inner.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": eos,
        "chat_template": template,
        "tokenizer_class": "TokenizersBackend",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return Tokenizer.load(folder)


def questions(count: int) -> list[str]:
    rest = "<|im_start|>user\nsay {}<|im_end|>\n<|im_start|>assistant\n"
    return [rest.format(f"{WORDS[at // 6 % 6]} {WORDS[at % 6]}") for at in range(count)]


@pytest.fixture(scope="module", params=[EOT, IM_END], ids=["base", "instruct"])
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a model that repeats a word of the question, tuned on chats with an initial model's files."""
    folder: Path = tmp_path_factory.mktemp("tuned")
    tokenizer = tokenizer_in(folder, request.param)
    rows = [
        {"messages": [{"role": "user", "content": f"say {a} {b}"}, {"role": "assistant", "content": f"{b}!"}]}
        for a in WORDS
        for b in WORDS
    ]
    (folder / "train.jsonl").write_text(lines(rows))
    (folder / "valid.jsonl").write_text(lines(rows[:4]))
    model = replace(
        weights.GPT, layers=2, hidden=32, heads=2, sequence=64, vocab=tokenizer.vocab, init_std=0.02
    )
    weights.checkpoint(folder / "init", model, weights.random_state(model))
    (folder / "init/generation_config.json").write_text(json.dumps({"eos_token_id": [7], "top_p": 0.9}))
    raw = config_for(folder, model={"sequence": 64}, optimizer={"lr": 1e-2}, tune={"epochs": 12})
    learn(folder / "run", {**raw, "init": str(folder / "init"), "save": {"every": 0}})
    return folder / "run"


def test_every_chat_of_a_tuned_model_ends(tuned: Path) -> None:
    (checkpoint,) = (tuned / "checkpoints").glob("step-*")
    decoder = open_decoder(checkpoint)
    sinks = []
    for prompt in questions(40):
        sinks.append(Text(decoder.tokenizer))
        decoder.batcher.submit(
            decoder.continuation(decoder.ids_of(prompt), Sampling(max_tokens=20, temperature=0), sinks[-1])
        )
    decoder.run()
    assert [sink.reason for sink in sinks] == [End.STOP] * 40
    assert decoder.end_ids[0] == 7 and not any(IM_END in sink.text for sink in sinks)


def test_transformers_ends_every_chat_of_an_export(tuned: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    (checkpoint,) = (tuned / "checkpoints").glob("step-*")
    export_weights(checkpoint, tmp_path / "hf", "hf", ExportRequest())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    end = tokenizer.convert_tokens_to_ids(IM_END)
    for prompt in questions(40):
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            made = model.generate(**ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert made[0, -1] == end and made.shape[1] < ids["input_ids"].shape[1] + 20


def test_an_export_names_every_end_that_the_training_may_have_taught(tuned: Path, tmp_path: Path) -> None:
    (checkpoint,) = (tuned / "checkpoints").glob("step-*")
    export_weights(checkpoint, tmp_path / "hf", "hf", ExportRequest())
    generation = json.loads((tmp_path / "hf/generation_config.json").read_text())
    tokenizer = Tokenizer.load(checkpoint)
    both = {tokenizer.id_of(EOT), tokenizer.id_of(IM_END)}
    assert generation["eos_token_id"][0] == 7 and {7, *both} == set(generation["eos_token_id"])
    assert generation["top_p"] == 0.9
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] == generation["eos_token_id"]


@pytest.mark.parametrize("eos", [EOT, IM_END])
def test_a_prompt_with_an_answer_ends_with_the_tokenizers_eos_token(tmp_path: Path, eos: str) -> None:
    tokenizer = tokenizer_in(tmp_path, eos)
    assert tokenizer.eod == tokenizer.id_of(EOT)
    (tmp_path / "train.jsonl").write_text(lines([completion(1)]))
    data = ChatData(read_config(config_for(tmp_path)))
    assert data.examples(data.config.tune.train).tokens[-1] == tokenizer.id_of(eos)
    pair = {"prompt": "say red\n", "chosen": "red!", "rejected": "sun!"}
    (tmp_path / "train.jsonl").write_text(lines([pair]))
    pairs = PairData(read_config(config_for(tmp_path, tune={"task": "dpo"})))
    examples = pairs.examples(pairs.config.tune.train)
    assert {int(examples.tokens[end - 1]) for end in examples.ends[1:]} == {tokenizer.id_of(eos)}
    # Named ids win.
    raw = config_for(tmp_path, tune={"task": "dpo"})
    raw["data"]["eod"] = 5
    assert PairData(read_config(raw)).eod == 5


def test_ends_come_from_the_generation_config_the_tokenizer_and_the_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path, EOT, eos_token_id=[9, 11])
    assert SideFiles.beside(tmp_path).ends(tokenizer) == (
        9,
        11,
        tokenizer.id_of(EOT),
        tokenizer.id_of(IM_END),
    )
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = tokenizer_in(tmp_path, IM_END, [{"name": "default", "template": plain}], eos_token_id=9)
    assert SideFiles.beside(tmp_path / "tokenizer.json").ends(tokenizer) == (9, tokenizer.id_of(IM_END))
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('none') }}")
    assert SideFiles.beside(tmp_path).ends(tokenizer) == (9, tokenizer.id_of(IM_END))


def test_the_ends_of_an_import_are_those_of_its_config(tmp_path: Path) -> None:
    model = replace(weights.GPT, sequence=24)
    ours = weights.checkpoint(tmp_path / "ours", model, weights.random_state(model))
    export_weights(ours, tmp_path / "hf", "hf", ExportRequest())
    (tmp_path / "hf/generation_config.json").unlink()
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(
        json.dumps({**config, "eos_token_id": [4, 5], "bos_token_id": 3})
    )
    import_weights(tmp_path / "hf", tmp_path / "again")
    assert SideFiles.beside(tmp_path / "again").generation["eos_token_id"] == [4, 5]
    export_weights(tmp_path / "again", tmp_path / "back", "hf", ExportRequest())
    back = json.loads((tmp_path / "back/config.json").read_text())
    assert back["eos_token_id"] == [4, 5] and back["bos_token_id"] == 3
