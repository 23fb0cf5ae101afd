"""Instruction tuning: which tokens are learned, packing, faults of rows, steps, and ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import native
from native.reference import hidden
from tests.support.tuning import CHATML, completion, config_for, conversation, learn, lines, losses_of
from trainer.chat_template import ChatTemplate, TemplateError
from trainer.checkpoint.store import open_checkpoint
from trainer.errors import DataError
from trainer.evaluate.rows import RowFault
from trainer.plan.resolve import plan_config, read_config
from trainer.plan.summary import check, summary
from trainer.side_files import SideFiles
from trainer.tune.chat import ChatData
from trainer.tune.chat_model import ChatModel
from trainer.tune.conversations import ChatReader, read_examples
from trainer.tune.examples import UNCOUNTED, packed
from trainer.tune.files import data_of


def learned_text(data: ChatData, row: int) -> str:
    """Return the text of the targets that count."""
    _, targets = data.examples(data.config.tune.train).row(row)
    return "".join(data.tokenizer._inner.id_to_token(int(each)) for each in targets if each != UNCOUNTED)


def test_answers_and_what_ends_them_are_learned(material: Path) -> None:
    data = ChatData(read_config(config_for(material)))
    assert learned_text(data, 1) == "sun!<|im_end|>Ċred!<|im_end|>Ċ"
    # The row of a prompt and a completion, and the end of the text.
    assert learned_text(data, 15) == "blue!<|endoftext|>"


def test_a_template_may_mark_its_answers(material: Path, tmp_path: Path) -> None:
    marked = CHATML.replace(
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}",
        "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
        "{{ '<|im_end|>\n' }}",
    )
    (tmp_path / "marked.jinja").write_text(marked)
    data = ChatData(read_config(config_for(material, tune={"template": str(tmp_path / "marked.jinja")})))
    assert learned_text(data, 1) == "sun!red!"


def test_an_answer_that_loses_its_reasoning_when_others_follow_is_found() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}(thinks){% endif %}"
        "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    reader = ChatReader(ChatTemplate(source, {}))
    (marked,) = reader.example(1, conversation(1))
    assert [marked.text[begin:end] for begin, end in marked.spans] == ["sun!</s>", "(thinks)red!</s>"]


QUESTION = {"role": "user", "content": "a < b?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "2"}
TALK = [QUESTION, {"role": "assistant", "content": "sun"}, QUESTION, CALL, RESULT]
TALK = [*TALK, {"role": "assistant", "content": "<b>"}]
# Templates that write the same message in other ways, as those of well-known models do: what begins a prompt,
# what an answer begins and ends with.
HABITS = {
    "the prompt ends with the beginning of a reasoning": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<call>{{ c.function.name }}"
        "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}",
        ["sun</s>", "<call>add</s>", "<b></s>"],
    ),
    "a text ends with another token than an answer": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<call>{{ c.function.name }}"
        "{% endfor %}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% else %}<eos>{% endif %}",
        ["sun<end>\n", "<call>add<end>\n", "<b><end>\n<eos>"],
    ),
    "the last answer ends with another token": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<call>{{ c.function.name }}"
        "{% endfor %}{{ '<return>' if loop.last and not add_generation_prompt else '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        ["sun<end>", "<call>add<end>", "<b><return>"],
    ),
    "a prompt has no header after the result of a tool": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<call>{{ c.function.name }}"
        "{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<assistant>{% endif %}",
        ["sun</s>", "<call>add</s>", "<b></s>"],
    ),
    "answers to older questions lose their reasoning": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>"
        "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think></think>{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls %}<call>{{ c.function.name }}{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        ["sun</s>", "<think></think><call>add</s>", "<think></think><b></s>"],
    ),
}


@pytest.mark.parametrize("habit", HABITS)
def test_only_answers_are_learned_whatever_the_template_does(habit: str) -> None:
    source, expected = HABITS[habit]
    (marked,) = ChatReader(ChatTemplate(source, {})).example(1, {"messages": TALK})
    assert [marked.text[begin:end] for begin, end in marked.spans] == expected
    more = [*TALK, *TALK]
    (marked,) = ChatReader(ChatTemplate(source, {})).example(1, {"messages": more})
    learned = [marked.text[begin:end] for begin, end in marked.spans]
    assert len(learned) == 6 and learned[3:] == expected
    assert all(text.startswith(("sun", "<call>add", "<b>")) for text in learned[:3])


@pytest.mark.parametrize("calls", ["add", {"name": "add"}, ["add"], [{"function": "add"}]])
def test_calls_of_tools_in_another_form_are_refused(calls: object) -> None:
    source, _ = HABITS["the last answer ends with another token"]
    talk = [QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}, QUESTION, TALK[1]]
    with pytest.raises(RowFault, match="tool_calls of message 1 are no list"):
        ChatReader(ChatTemplate(source.replace("c.function.name", "c"), {})).example(1, {"messages": talk})


def test_an_answer_that_the_template_leaves_out_is_refused() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}" + (
        "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    with pytest.raises(RowFault, match="leaves out message 3"):
        ChatReader(ChatTemplate(source, {})).example(1, {"messages": TALK})


def test_examples_in_one_row_give_the_loss_of_each_alone(material: Path) -> None:
    for changes in ({}, {"rotary": True, "query_groups": 1, "norm": "rms", "window": 20}):
        config = read_config(config_for(material, model=changes))
        data = ChatData(config)
        order = data.orders()["valid"]
        model = ChatModel(config.model, native.choose("cpu", "reference")).eval()
        joined = [torch.from_numpy(part) for part in order.read(range(4))]
        total, count = torch.zeros(()), 0
        for number in range(4):
            (tokens,), (targets,), _ = (torch.from_numpy(part) for part in order.read([number]))
            likely = model(tokens[None]).log_softmax(-1)[0]
            chosen = targets != UNCOUNTED
            total = total - likely[chosen].gather(1, targets[chosen][:, None]).sum()
            count += int(chosen.sum())
        loss = model(*model.arguments(joined))
        assert (
            float(loss.detach()) == pytest.approx(float(total.detach()) / count, abs=1e-5)
            and model.counted(joined) == count
        )
        assert model.take_accuracy()[1] == count
        rows = ChatData(read_config(config_for(material, tune={"packing": True}, model=changes)))
        packing = rows.order(config.tune.valid, None)
        micro = [torch.from_numpy(part) for part in packing.read(range(len(packing.rows)))]
        assert micro[0].shape == (len(packing.rows), 256) and len(packing.rows) < 7
        everything = [torch.from_numpy(part) for part in order.read(range(7))]
        own, wanted = (model(*model.arguments(each)) for each in (micro, everything))
        assert float(own.detach()) == pytest.approx(float(wanted.detach()), abs=1e-5)


def test_the_last_block_computes_only_the_rows_whose_loss_counts(material: Path) -> None:
    config = read_config(config_for(material))
    model = ChatModel(config.model, native.choose("cpu", "reference"))
    joined = [torch.from_numpy(part) for part in ChatData(config).orders()["valid"].read(range(4))]
    rows = []
    for block in model.blocks.values():
        block.feed_forward.register_forward_pre_hook(
            lambda _, given: rows.append(given[0].shape[:-1].numel())
        )
    model(*model.arguments(joined))
    assert rows[-1] == model.counted(joined) < min(rows[:-1])


def test_attention_by_a_mask_equals_attention_of_each_example(material: Path) -> None:
    from trainer.model import masks

    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    assert masks.places(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    far = [hidden(native.Mask(window, documents), 6, 6, documents.device) for window in (0, 2)]
    assert far[0][0, 0][4].tolist() == [True, True, True, False, False, True]
    assert far[1][1, 0][4].tolist() == [True, True, True, False, False, True]


def test_packed_rows_hold_every_example_once_and_no_more_than_fits() -> None:
    lengths = np.random.RandomState(0).randint(1, 60, 200).tolist()
    rows = packed(lengths, 64)
    assert sorted(number for row in rows for number in row) == list(range(200))
    assert max(sum(lengths[number] for number in row) for row in rows) <= 64
    assert len(rows) <= 1.1 * sum(lengths) / 64 + 1


def test_a_role_that_the_template_leaves_out_is_refused_with_its_line(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% elif m.role == 'assistant' %}"
        "{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    row = {"messages": [{"role": "User", "content": "x"}, *conversation(1)["messages"]]}
    file = tmp_path / "chat.jsonl"
    file.write_text(lines([conversation(2), row]))
    with pytest.raises(DataError) as caught:
        read_examples(file, ChatReader(ChatTemplate(source, {})).example)
    assert caught.value.message.startswith(
        f"{file}:2: message 0 has the role 'User', which the chat template"
    )
    # A template that writes any role takes this one too, as transformers does.
    (marked,) = ChatReader(ChatTemplate(CHATML, {})).example(1, row)
    assert "<|im_start|>User" in marked.text


def test_steps_follow_from_examples_or_rows(material: Path) -> None:
    config = read_config(config_for(material, tune={"epochs": 3}))
    assert (config.steps, config.eval.every, config.eval.batches, config.save.keep.best) == (15, 5, 2, 1)
    rows = ChatData(read_config(config_for(material, tune={"packing": True})))
    count = rows.samples(config.tune.train)
    config = read_config(config_for(material, tune={"packing": True, "epochs": 2}))
    assert config.steps == -(-2 * count // 4)


BAD = [
    (
        '{"messages": [{"role": "user", "content": "x"}]}',
        "has no answer: no message has the role 'assistant'",
    ),
    (
        '{"messages": [{"role": "assistant", "content": ""}]}',
        "has no answer: the content of message 0 is empty",
    ),
    ('{"messages": "x"}', "field 'messages' is not a list of messages"),
    ('{"prompt": "x"}', "has neither 'messages' nor 'prompt' and 'completion' (it has: prompt)"),
    ('{"prompt": "x", "completion": ""}', "has no answer: field 'completion' is empty"),
    ("[1]", "not a JSON object"),
    ("{", "not JSON"),
]


def test_faults_of_rows_are_named_together_with_file_and_line(material: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(lines([completion(0)]) + "\n".join(row for row, _ in BAD) + "\n")
    with pytest.raises(DataError) as caught:
        ChatData(read_config(config_for(material))).examples(str(file))
    found = caught.value.message.splitlines()
    for number, (_, problem) in enumerate(BAD):
        assert found[number].startswith(f"{file}:{number + 2}: {problem}"), found
    # The plan refuses them before anything is pushed.
    document = {"train": config_for(material, tune={"train": str(file)}), "check_data": True}
    faults = check(document)["faults"]
    assert faults[0]["key"] == "train.tune.train" and f"{file}:2: has no answer" in faults[0]["what"]


def test_too_long_examples_are_refused_cut_or_left_out(material: Path) -> None:
    def examples(too_long: str) -> Any:
        raw = config_for(material, tune={"too_long": too_long}, model={"sequence": 60})
        return ChatData(read_config(raw)).examples(str(material / "train.jsonl"))

    with pytest.raises(DataError, match=r"train\.jsonl:\d+: has \d+ tokens"):
        examples("refuse")
    assert 0 < len(examples("leave_out")) < 20
    assert len(examples("cut")) == 20 and max(examples("cut").lengths) == 60


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": {"kind": "glm"}}, "train.tune.task"),
        ({"data": {}}, "train.data.tokenizer"),
        ({"tune": {"pattern": 1}}, "train.tune.pattern"),
        ({"tune": {"too_long": "keep"}}, "train.tune.too_long"),
    ],
)
def test_what_does_not_fit_is_refused(material: Path, changes: dict[str, Any], key: str) -> None:
    faults = plan_config(config_for(material, **changes), 1).faults
    assert key in [fault.key for fault in faults], faults


@pytest.mark.parametrize(
    ("source", "key", "problem"),
    [
        ("{% for %}", "train.tune.template", "wrong.jinja:1: not a jinja template"),
        (
            "{{ 1 / 0 }}",
            "train.tune.train",
            "train.jsonl:1: the chat template refuses the messages: division",
        ),
        (
            "{{ messages.pop(99) }}",
            "train.tune.train",
            "train.jsonl:1: the chat template refuses the messages",
        ),
        ("{{ '%d'.format() }}{{ '{3}'.format(1) }}", "train.tune.train", "refuses the messages: IndexError"),
        ("{{ {}['a'].b.c }}", "train.tune.train", "train.jsonl:1: the chat template refuses the messages"),
    ],
)
def test_a_template_that_fails_is_a_fault_and_no_traceback(
    material: Path, tmp_path: Path, source: str, key: str, problem: str
) -> None:
    file = tmp_path / "wrong.jinja"
    file.write_text(source)
    raw = config_for(material, tune={"template": str(file)})
    faults = check({"train": raw, "world_size": 1, "check_data": True})["faults"]
    assert faults[0]["key"] == key and problem in faults[0]["what"] and faults[0]["remedy"]


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    message = {"role": "user", "content": "x"}
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ raise_exception('no') }}",
        "{% for i in range(100000000) %}{{ i }}{% endfor %}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(TemplateError, match="the chat template refuses the messages: "):
            ChatTemplate(source, {}).render([message])
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "{{ bos_token }}"}], "bos_token": {"content": "<s>"}}'
    )
    found = SideFiles.beside(tmp_path).template()
    assert found is not None and found.render([message]) == "<s>"


def test_answers_are_learned(material: Path, tmp_path: Path) -> None:
    learn(tmp_path / "run", config_for(material, tune={"epochs": 12}, optimizer={"lr": 1e-2}))
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [event["accuracy"] for event in events if event["event"] == "eval"]
    assert measured[0] < 0.2 and max(measured) > 0.9, measured


@pytest.mark.parametrize(
    "layout",
    [
        {"tune": {"packing": True}},
        {"zero": 2},
        {"parallel": {"tensor": 2, "sequence": True}},
        {"parallel": {"pipeline": 2}, "recompute": "full"},
        {"parallel": {"context": 2}, "model": {"rotary": True, "query_groups": 1}},
    ],
)
def test_two_ranks_learn_what_one_learns(
    material: Path, tmp_path: Path, run_ranks: Callable[..., Any], layout: dict[str, Any]
) -> None:
    config = config_for(material, **{"steps": 3, "save": {"every": 3}, **layout})
    layout_keys = ("zero", "parallel", "recompute", "engine")
    alone = {key: value for key, value in config.items() if key not in layout_keys}
    learn(tmp_path / "one", alone)
    done = run_ranks(2, config, tmp_path / "two")
    assert all(rank.returncode == 0 for rank in done), done[0].stderr
    assert losses_of(tmp_path / "one") == pytest.approx(losses_of(tmp_path / "two"), abs=1e-5)


def test_a_file_that_cannot_be_read_names_the_key_to_correct(tmp_path: Path) -> None:
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe")
    for file, problem in ((tmp_path / "absent.jsonl", "No such file"), (binary, "not UTF-8 at byte 0")):
        with pytest.raises(DataError, match=problem) as caught:
            read_examples(file, lambda line, row: [])
        assert "train.tune" in caught.value.hint


@pytest.mark.parametrize("task", ["chat", "dpo"])
def test_the_tokens_of_samples_that_vary_in_length_are_counted(
    material: Path, tmp_path: Path, task: str
) -> None:
    rows = [completion(number) for number in range(8)]
    if task == "dpo":
        rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no"} for row in rows]
    (tmp_path / "train.jsonl").write_text(lines(rows))
    tune = {"task": task, "train": str(tmp_path / "train.jsonl"), "valid": "", "epochs": 2}
    raw = config_for(material, tune=tune, eval={"batches": 0}, save={"every": 2})
    raw["data"] = {**raw["data"], "seed": 3}
    data = data_of(read_config(raw))
    examples = data.examples(tune["train"])
    whole = int(examples.lengths.sum())
    # Two epochs of 8 samples in 4 steps.
    planned = check({"train": raw, "world_size": 1, "check_data": True})["summary"]
    assert planned["tokens_total"] == pytest.approx(2 * whole, rel=0.05)
    assert planned["time"]["tokens_per_second"] > 0
    learn(tmp_path / "run", raw)
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4] and steps[-1]["tokens"] == 2 * whole
    assert open_checkpoint(tmp_path / "run/checkpoints/step-00000004").manifest.tokens == 2 * whole
    # A resume continues to count.
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    learn(tmp_path / "run", raw)
    assert open_checkpoint(tmp_path / "run/checkpoints/step-00000004").manifest.tokens == 2 * whole


def test_frozen_weights_have_no_gradient_to_compute(material: Path) -> None:
    """A plan never exceeds the efficiency that it assumes, with adapters too."""
    raw = config_for(
        material, tune={"lora": {"rank": 2}}, hardware={"tflops": 10, "efficiency": 0.5}, init="base"
    )
    config = read_config({**raw, "steps": 4})
    for lora in (config.tune.lora, type(config.tune.lora)()):
        found = summary(replace(config, tune=replace(config.tune, lora=lora)), 1)
        assert found.tflops_per_device["model"] <= 10 * 0.5 * 1.001
