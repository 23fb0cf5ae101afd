"""Fine-tuning judged by its peers: transformers renders templates, transformers, peft and trl compute losses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import native
from clusterctl.wire.requests import ExportRequest, ImportRequest
from tests.support.tuning import conversation, lines, write_files
from trainer.chat_template import ChatTemplate, TemplateError
from trainer.config.lora import LoraConfig
from trainer.config.model import ModelConfig
from trainer.corpus.tokenizer import Tokenizer
from trainer.engine.rank_state import load_parameters
from trainer.generate.loading import load_model
from trainer.model.adapter import adapt
from trainer.plan.resolve import read_config
from trainer.tune.chat import ChatData
from trainer.tune.chat_model import ChatModel
from trainer.tune.conversations import ChatReader
from trainer.tune.dpo_model import PreferenceModel
from trainer.tune.pairs import PairData
from trainer.weights.adapters.merge import read_whole
from trainer.weights.adapters.peft import ALL_FORMATS
from trainer.weights.convert import export_weights, import_weights
from trainer.weights.families.registry import FAMILIES
from trainer.weights.huggingface import read_huggingface
from trainer.weights.lazy import in_memory
from trainer.weights.rules import rules_of, to_ours

REASON = "is not installed (pip install -e '.[judges]')"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Ä <&>", "parameters": {"type": "object"}},
}
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " hello\n"}, {"role": "assistant", "content": "good day"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two <&> 'x'?"},
        {"role": "assistant", "content": "2 Ä"},
    ],
    [
        {"role": "user", "content": "think"},
        {"role": "assistant", "content": "yes", "reasoning_content": "because"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nno"},
    ],
]


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason=f"transformers {REASON}")


@pytest.fixture(scope="module")
def peft(transformers: Any) -> Any:
    return pytest.importorskip("peft", reason=f"peft {REASON}")


@pytest.fixture(scope="module")
def trl(peft: Any) -> Any:
    return pytest.importorskip("trl", reason=f"trl {REASON}")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return files of conversations whose tokenizer transformers can load."""
    folder = write_files(tmp_path_factory.mktemp("judged"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def templates(trl: Any) -> list[Path]:
    return sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))


def test_templates_are_rendered_as_transformers_renders_them(trl: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    compared = refused = 0
    for file in templates(trl):
        source = file.read_text()
        for talk in TALKS:
            for prompt, tools in ((False, None), (True, None), (False, [TOOL])):
                own: Any
                try:
                    theirs = render_jinja_template(
                        [talk], tools, None, source, False, add_generation_prompt=prompt, **SPECIAL
                    )[0][0]
                except Exception:
                    with pytest.raises(TemplateError, match="the chat template refuses"):
                        ChatTemplate(source, SPECIAL).render(talk, prompt, tools)
                    refused += 1
                    continue
                own = ChatTemplate(source, SPECIAL).render(talk, prompt, tools)
                assert own == theirs, (file.name, talk, prompt)
                compared += 1
    assert compared > 300 and refused < compared / 5, (compared, refused)


def test_marked_answers_are_those_of_transformers(trl: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    compared = 0
    for file in templates(trl):
        template = ChatTemplate(file.read_text(), SPECIAL)
        if not template.marks_answers:
            continue
        for talk in TALKS:
            try:
                texts, spans = render_jinja_template([talk], None, None, template.source, True, **SPECIAL)
            except Exception:
                continue
            assert template.tracked(talk) == (texts[0], [tuple(span) for span in spans[0]]), file.name
            compared += 1
    assert compared > 40


def test_found_answers_contain_the_marked_ones(trl: Any) -> None:
    """Templates with marks, and the same ones without: what is found by rendering prompts contains what is marked."""
    found = 0
    for file in templates(trl):
        marked = file.with_name(f"{file.stem}_training.jinja")
        if not marked.is_file():
            continue
        pair = [ChatTemplate(each.read_text(), SPECIAL) for each in (file, marked)]
        if not pair[1].marks_answers or pair[0].marks_answers:
            continue
        for talk in (*TALKS, [*TALKS[0], *TALKS[0]]):
            try:
                (own,), (other,) = (ChatReader(template).example(1, {"messages": talk}) for template in pair)
            except TemplateError:
                continue
            if own.text != other.text:
                continue
            # Some marks begin with what a prompt ends with.
            for _, end in other.spans:
                assert any(first < end <= last for first, last in own.spans), (file.name, talk)
            found += 1
    assert found > 60


# -- losses and gradients -----------------------------------------------------------------------------------


def peer(transformers: Any, kind: str, vocab: int) -> Any:
    """Return a small model of transformers with random weights and without dropout."""
    torch.manual_seed(3)
    if kind == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        config = transformers.GPT2Config(
            vocab_size=vocab, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **sizes
        )
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        sizes |= {"max_position_embeddings": 256}
        if kind != "GPTNeoX":
            sizes["num_key_value_heads"] = 2
        if kind == "Mixtral":
            sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        if kind == "Qwen3Moe":
            sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        config = getattr(transformers, f"{kind}Config")(vocab_size=vocab, **sizes)
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def chat_config(material: Path, model: ModelConfig, **tune: Any) -> Any:
    raw = {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "sequence": 256, "vocab": model.vocab},
        "data": {"tokenizer": str(material / "tokenizer.json")},
        "tune": {"task": "chat", "train": str(material / "train.jsonl"), **tune},
    }
    return replace(read_config(raw), model=model)


def batch_of(data: Any, numbers: range) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return our micro-batch of some examples, and the padded batch of them with labels and mask."""
    order = data.orders()["train"]
    order.seed = None
    micro = [torch.from_numpy(part) for part in order.read(numbers)]
    rows = [data.examples(data.config.tune.train).row(number) for number in numbers]
    longest = max(len(tokens) for tokens, _ in rows) + 1
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.int64), torch.full((len(rows), longest), -100)
    mask = torch.zeros_like(ids)
    for at, (tokens, targets) in enumerate(rows):
        ids[at, : len(tokens)], labels[at, 1 : len(targets) + 1] = torch.tensor(tokens), torch.tensor(targets)
        # The last token is read by none of ours.
        last = targets[-1]
        ids[at, len(tokens)], mask[at, : len(tokens) + 1] = max(int(last), 0), 1
    return micro, ids, labels, mask


def theirs_as_ours(model: Any, family: str, config: ModelConfig) -> dict[str, Tensor]:
    """Return the gradients of a model of transformers under our names."""
    given = {}
    for name, parameter in model.named_parameters():
        for prefix in (*FAMILIES[family].prefixes, ""):
            if name.startswith(prefix):
                given[name.removeprefix(prefix)] = in_memory(
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
                break
    head = model.get_output_embeddings().weight
    given.setdefault(FAMILIES[family].head, in_memory(head.grad))
    rules = [
        rule
        for rule in rules_of(FAMILIES[family].rules, config.layers)
        if all(name in given for name in rule.theirs)
    ]
    return {rule.ours: to_ours(rule, config, given).whole() for rule in rules}


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen3", "Mistral", "GPTNeoX"])
def test_loss_and_gradients_of_answers_are_those_of_transformers(
    material: Path, tmp_path: Path, transformers: Any, kind: str
) -> None:
    vocab = Tokenizer.load(material / "tokenizer.json").vocab
    model = peer(transformers, kind, vocab)
    model.save_pretrained(tmp_path / "hf")
    contents = read_huggingface(tmp_path / "hf", ImportRequest())
    config = replace(contents.model, dropout=0.0, attention_dropout=0.0)
    own = ChatModel(config, native.choose("cpu"))
    load_parameters(own, ((name, lazy.whole()) for name, lazy in contents.parameters.items()))
    micro, ids, labels, mask = batch_of(ChatData(chat_config(material, config)), range(6))
    expected = model(input_ids=ids, labels=labels, attention_mask=mask).loss
    expected.backward()
    loss = own(*own.arguments(micro))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    wanted = theirs_as_ours(model, model.config.model_type, config)
    for name, parameter in own.named_parameters():
        assert parameter.grad is not None
        gradient = parameter.grad[: config.vocab] if name.startswith(("tokens", "output")) else parameter.grad
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=0, msg=name)


ADAPTED = [
    ("GPT2", ["c_attn", "c_proj"]),
    ("GPT2", ["attn.c_proj", "c_fc"]),
    ("Llama", ["q_proj", "v_proj", "gate_proj", "down_proj"]),
    ("Qwen3", ["k_proj", "o_proj", "up_proj"]),
    ("GPTNeoX", ["query_key_value", "dense_h_to_4h"]),
    ("Mixtral", ["q_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ("Qwen3Moe", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ("Qwen3Moe", ["v_proj", "mlp.experts.down_proj"]),
    ("Qwen3Moe", ["mlp.experts.gate_up_proj"]),
]


@pytest.mark.parametrize(("kind", "targets"), ADAPTED)
def test_adapters_are_those_of_peft(
    material: Path, tmp_path: Path, transformers: Any, peft: Any, kind: str, targets: list[str]
) -> None:
    vocab = Tokenizer.load(material / "tokenizer.json").vocab
    model = peer(transformers, kind, vocab)
    model.save_pretrained(tmp_path / "hf")
    parameters = [target for target in targets if "." in target and "experts" in target]
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=[target for target in targets if target not in parameters],
        target_parameters=parameters or None,
        fan_in_fan_out=kind == "GPT2",
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path / "peft")
    asked = ImportRequest(base=str(tmp_path / "hf"))
    import_weights(tmp_path / "peft", tmp_path / "ours", request=asked, formats=ALL_FORMATS)
    found = read_whole(tmp_path / "ours", state=False)
    adapters = found.adapters
    assert adapters is not None and isinstance(adapters.lora, LoraConfig)
    config = replace(found.model, dropout=0.0, attention_dropout=0.0)
    own = ChatModel(config, native.choose("cpu"))
    adapt(own, config, adapters.lora, 1)
    base = read_huggingface(tmp_path / "hf", ImportRequest()).parameters
    load_parameters(own, ((name, lazy.whole()) for name, lazy in base.items()))
    load_parameters(own, adapters.tensors.items())
    micro, ids, labels, mask = batch_of(ChatData(chat_config(material, config)), range(6))
    theirs.train()
    expected = theirs(input_ids=ids, labels=labels, attention_mask=mask).loss
    expected.backward()
    loss = own(*own.arguments(micro))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    learned = {name: p.grad for name, p in own.named_parameters() if p.requires_grad}
    norms = [
        sum(float(g.square().sum()) for g in found if g is not None) ** 0.5
        for found in (learned.values(), [p.grad for p in theirs.parameters() if p.requires_grad])
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0
    # Out again: PEFT computes the same with it, and the same tensors are in it.
    tokens, theirs = ids[:, :16], theirs.eval()
    read = lambda folder, state: read_whole(folder, state)  # noqa: E731
    export_weights(
        tmp_path / "ours", tmp_path / "back", "peft", ExportRequest(), form=ALL_FORMATS["peft"], read=read
    )
    with torch.no_grad():
        wanted = theirs(tokens).logits
        fresh = type(model).from_pretrained(tmp_path / "hf").eval()
        again = peft.PeftModel.from_pretrained(fresh, tmp_path / "back").eval()
        assert (again(tokens).logits - wanted).abs().max() < 1e-5
        # Merged: as one model, by ours and by transformers.
        export_weights(tmp_path / "ours", tmp_path / "merged", "hf", ExportRequest(), read=read)
        merged = type(model).from_pretrained(tmp_path / "merged").eval()
        assert (merged(tokens).logits - wanted).abs().max() < 1e-5
    from trainer.checkpoint.store import open_checkpoint

    with torch.no_grad():
        assert (load_model(open_checkpoint(tmp_path / "ours"))(tokens) - wanted).abs().max() < 1e-5


MIXED: list[dict[str, Any]] = [
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 6}, "alpha_pattern": {"v_proj": 3}},
    {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 9}, "use_rslora": True},
    {"layers_to_transform": [1]},
    {"modules_to_save": ["lm_head", "embed_tokens", "model.norm"]},
]


@pytest.mark.parametrize("settings", MIXED)
def test_adapters_that_differ_and_whole_modules_are_those_of_peft(
    material: Path, tmp_path: Path, transformers: Any, peft: Any, settings: dict[str, Any]
) -> None:
    from trainer.checkpoint.store import open_checkpoint

    model = peer(transformers, "Llama", Tokenizer.load(material / "tokenizer.json").vocab)
    model.save_pretrained(tmp_path / "hf")
    asked = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings
    )
    theirs = peft.get_peft_model(model, asked)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "peft")
    request = ImportRequest(base=str(tmp_path / "hf"))
    import_weights(tmp_path / "peft", tmp_path / "ours", request=request, formats=ALL_FORMATS)
    form = ALL_FORMATS["peft"]
    export_weights(tmp_path / "ours", tmp_path / "back", "peft", ExportRequest(), form=form, read=read_whole)
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        wanted = theirs.eval()(tokens).logits
        own = load_model(open_checkpoint(tmp_path / "ours"))(tokens)
        fresh = type(model).from_pretrained(tmp_path / "hf").eval()
        again = peft.PeftModel.from_pretrained(fresh, tmp_path / "back").eval()(tokens).logits
    assert (own - wanted).abs().max() < 1e-5 and (again - wanted).abs().max() < 1e-5


def test_adapters_of_each_expert_are_read_as_peft_reads_them_and_written_in_its_present_layout(
    material: Path, tmp_path: Path, transformers: Any, peft: Any
) -> None:
    """With a pair for each matrix of each expert, as PEFT saved them on transformers 4."""
    from safetensors.torch import save_file

    model = peer(transformers, "Mixtral", Tokenizer.load(material / "tokenizer.json").vocab)
    model.save_pretrained(tmp_path / "hf")
    torch.manual_seed(5)
    tensors = {}
    for layer in range(2):
        for name, (inputs, outputs) in {"w1": (32, 64), "w3": (32, 64), "w2": (64, 32)}.items():
            for expert in range(4):
                path = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                tensors[f"{path}.lora_A.weight"] = 0.2 * torch.randn(4, inputs)
                tensors[f"{path}.lora_B.weight"] = 0.2 * torch.randn(outputs, 4)
    (tmp_path / "peft").mkdir()
    save_file(tensors, tmp_path / "peft" / "adapter_model.safetensors")
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["w1", "w2", "w3"], task_type="CAUSAL_LM")
    settings.save_pretrained(tmp_path / "peft")
    asked = ImportRequest(base=str(tmp_path / "hf"))
    import_weights(tmp_path / "peft", tmp_path / "ours", request=asked, formats=ALL_FORMATS)
    read = lambda folder, state: read_whole(folder, state)  # noqa: E731
    export_weights(
        tmp_path / "ours", tmp_path / "back", "peft", ExportRequest(), form=ALL_FORMATS["peft"], read=read
    )
    tokens, found = torch.arange(40).view(2, 20), []
    with torch.no_grad():
        for folder in ("peft", "back"):
            fresh = type(model).from_pretrained(tmp_path / "hf").eval()
            found.append(peft.PeftModel.from_pretrained(fresh, tmp_path / folder).eval()(tokens).logits)
        from trainer.checkpoint.store import open_checkpoint

        own = load_model(open_checkpoint(tmp_path / "ours"))(tokens)
        assert (found[0] - model(tokens).logits).abs().max() > 0.01
    assert all((logits - own).abs().max() < 1e-5 for logits in found)
    import_weights(tmp_path / "back", tmp_path / "again", request=asked, formats=ALL_FORMATS)
    first, second = (read_whole(tmp_path / name, False).adapters for name in ("ours", "again"))
    assert first is not None and second is not None and first.lora == second.lora
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


def test_the_loss_of_trl_is_ours(material: Path, tmp_path: Path, transformers: Any, trl: Any) -> None:
    import datasets

    vocab = Tokenizer.load(material / "tokenizer.json").vocab
    model = peer(transformers, "GPT2", vocab)
    model.save_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(material)
    rows = [
        {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
        for row in map(conversation, range(6))
    ]
    (tmp_path / "train.jsonl").write_text(lines(rows))
    settings = trl.SFTConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=6,
        use_cpu=True,
        report_to=[],
        bf16=False,
    )
    trainer = trl.SFTTrainer(
        model=model, args=settings, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    expected = trainer.compute_loss(trainer.model, batch)
    contents = read_huggingface(tmp_path / "hf", ImportRequest())
    own = ChatModel(contents.model, native.choose("cpu")).eval()
    load_parameters(own, ((name, lazy.whole()) for name, lazy in contents.parameters.items()))
    data = ChatData(chat_config(material, contents.model, train=str(tmp_path / "train.jsonl")))
    micro, *_ = batch_of(data, range(6))
    assert float(own(*own.arguments(micro)).detach()) == pytest.approx(float(expected.detach()), abs=1e-5)


def test_the_loss_of_preferences_is_that_of_trl(
    material: Path, tmp_path: Path, transformers: Any, trl: Any
) -> None:
    import datasets

    vocab = Tokenizer.load(material / "tokenizer.json").vocab
    model, other = (peer(transformers, "GPT2", vocab) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "hf")
    other.save_pretrained(tmp_path / "other")
    tokenizer = transformers.AutoTokenizer.from_pretrained(material)
    rows = [
        {
            "prompt": row["messages"][:-1],
            "chosen": row["messages"][-1:],
            "rejected": [{"role": "assistant", "content": "no, " + row["messages"][-1]["content"]}],
        }
        for row in map(conversation, range(6))
    ]
    (tmp_path / "train.jsonl").write_text(lines(rows))
    settings = trl.DPOConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=6,
        use_cpu=True,
        report_to=[],
        bf16=False,
    )
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=other,
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    expected = trainer.compute_loss(trainer.model, batch)
    models = []
    for folder in ("hf", "other"):
        contents = read_huggingface(tmp_path / folder, ImportRequest())
        own = PreferenceModel(contents.model, native.choose("cpu")).eval()
        load_parameters(own, ((name, lazy.whole()) for name, lazy in contents.parameters.items()))
        models.append(own)
    raw = chat_config(material, models[0].config, train=str(tmp_path / "train.jsonl"))
    order = PairData(replace(raw, tune=replace(raw.tune, task="dpo"))).order(
        str(tmp_path / "train.jsonl"), None
    )
    models[1].recorded = []
    models[1](*(torch.from_numpy(part) for part in order.read(range(6))))
    order.reference = models[1].recorded[0].numpy()
    loss = models[0](*(torch.from_numpy(part) for part in order.read(range(6))))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert abs(float(loss.detach()) - 0.6931) > 1e-3
