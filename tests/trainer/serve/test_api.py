from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.building import with_prefix
from tests.trainer.serve.conftest import Server
from trainer.checkpoint.store import verify
from trainer.corpus.tokenizer import Tokenizer
from trainer.generate.loading import load_model

Start = Callable[..., AbstractContextManager[Server]]


def test_models_health_and_tokens(server: Server, model: Path) -> None:
    assert server.ask("GET", "/v1/models")[1]["data"][0]["id"] == "small"
    assert server.ask("GET", "/v1/models/small")[1]["max_model_len"] == 256
    assert server.ask("GET", "/health") == (200, {"status": "ok", "model": "small"})
    ids = Tokenizer.load(model).encode("one two")
    body = {"prompt": "one two", "add_special_tokens": False}
    assert server.ask("POST", "/tokenize", body)[1]["tokens"] == ids
    assert server.ask("POST", "/detokenize", {"tokens": ids})[1] == {"prompt": "one two"}
    assert server.ask("GET", "/tokenizer_info")[1]["eos_token"] == "<|endoftext|>"


def test_prompts_are_texts_lists_and_ids(server: Server, model: Path) -> None:
    ids = Tokenizer.load(model).encode("one two three")
    fields = {"max_tokens": 8, "temperature": 0}
    plain = server.complete(prompt="one two three", **fields)
    assert plain["object"] == "text_completion" and plain["choices"][0]["finish_reason"] in ("stop", "length")
    assert plain["usage"]["prompt_tokens"] == len(ids)
    text = plain["choices"][0]["text"]
    for prompt in (["one two three"], ids, [ids]):
        assert server.complete(prompt=prompt, **fields)["choices"][0]["text"] == text
    many = server.complete(prompt=["one two three", "five", "six"], n=2, **fields)
    assert [choice["index"] for choice in many["choices"]] == list(range(6))
    assert many["choices"][0]["text"] == many["choices"][1]["text"] == text


def test_echoed_log_probabilities_are_those_of_the_model(server: Server, model: Path) -> None:
    ids = Tokenizer.load(model).encode("one two three four five six")
    network: Any = load_model(verify(model))
    with torch.no_grad():
        rows = torch.log_softmax(network(torch.tensor([ids]))[0], -1)
    for most in (1, 0):
        answer = server.complete(
            prompt=[ids], temperature=0, max_tokens=most, logprobs=1, seed=1234, echo=True
        )
        found = answer["choices"][0]["logprobs"]
        assert len(found["tokens"]) == len(found["top_logprobs"]) == len(ids) + most
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert answer["choices"][0]["text"].startswith("one two three four five six")
        for at in range(1, len(ids)):
            value = found["token_logprobs"][at]
            assert value == pytest.approx(float(rows[at - 1, ids[at]]), abs=1e-4)
            # Whether a token is the most likely one is decided by equality.
            is_top = int(rows[at - 1].argmax()) == ids[at]
            assert (value == max(found["top_logprobs"][at].values())) == is_top
            assert math.isclose(
                max(found["top_logprobs"][at].values()), float(rows[at - 1].max()), abs_tol=1e-4
            )


def test_a_stream_adds_up_to_the_answer(server: Server) -> None:
    fields = {"prompt": ["one two", "five"], "max_tokens": 20, "seed": 7, "logprobs": 2, "echo": True, "n": 2}
    whole = server.complete(**fields)
    events = server.events("/v1/completions", **fields, stream_options={"include_usage": True})
    assert events[-1]["usage"] == whole["usage"] and not events[-1]["choices"]
    for choice in whole["choices"]:
        own = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
        assert "".join(entry["text"] for entry in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        values = [v for e in own if e["logprobs"] for v in e["logprobs"]["token_logprobs"]]
        assert values == choice["logprobs"]["token_logprobs"]


def test_a_stop_text_ends_before_it(server: Server) -> None:
    fields: dict[str, Any] = {"prompt": "one two", "max_tokens": 40, "seed": 3}
    text = server.complete(**fields)["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    answer = server.complete(**fields, stop=["never there", stop])["choices"][0]
    assert answer["text"] == text[: text.index(stop)] and answer["finish_reason"] == "stop"


def test_chat_uses_the_template(server: Server, model: Path) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}
    ]
    fields = {"messages": messages, "temperature": 0, "max_completion_tokens": 9}
    status, answer = server.ask(
        "POST", "/v1/chat/completions", {**fields, "logprobs": True, "top_logprobs": 2}
    )
    assert status == 200 and answer["object"] == "chat.completion"
    plain = server.complete(prompt="<user>one two<assistant>", temperature=0, max_tokens=9)
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert answer["usage"] == plain["usage"]
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    events = server.events("/v1/chat/completions", **fields)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == answer["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]


def test_an_end_token_has_a_log_probability_and_no_text(server: Server, model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    fields = {"prompt": "one two", "max_tokens": 3, "temperature": 0, "logprobs": 1, "echo": True}
    fields["logit_bias"] = {str(tokenizer.eod): 100}
    (choice,) = server.complete(**fields)["choices"]
    assert choice["text"] == "one two" and choice["finish_reason"] == "stop"
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(tokenizer.encode("one two")) + 1 == len(found["token_logprobs"])
    assert found["tokens"][-1] == "<|endoftext|>" and found["token_logprobs"][-1] < 0
    events = server.events("/v1/completions", **fields)
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert [token for piece in pieces if piece for token in piece["tokens"]] == found["tokens"]
    body = {"messages": [{"role": "user", "content": "one"}], "logprobs": True, **fields}
    del body["prompt"], body["echo"]
    status, answer = server.ask("POST", "/v1/chat/completions", {**body, "logprobs": True})
    assert status == 200 and answer["choices"][0]["message"]["content"] == ""
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == ["<|endoftext|>"]


def test_a_part_of_a_character_is_spelled_by_its_bytes(server: Server, model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    # The vocabulary's name of the byte 0xe4.
    number = tokenizer.id_of("ä")
    fields = {"max_tokens": 1, "temperature": 0, "logit_bias": {str(number): 100}}
    found = server.complete(prompt="one", logprobs=0, **fields)["choices"][0]["logprobs"]
    assert found["tokens"] == ["bytes:\\xe4"] and list(found["top_logprobs"][0]) == found["tokens"]
    body = {"messages": [{"role": "user", "content": "one"}], "logprobs": True, **fields}
    (entry,) = server.ask("POST", "/v1/chat/completions", body)[1]["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "\\xe4" and entry["bytes"] == [0xE4]


def test_chat_template_kwargs_reach_the_template(serving: Start, model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ 'five' if enable_thinking else messages[0].content }}")
    fields = {"messages": [{"role": "user", "content": "one two"}], "temperature": 0, "max_tokens": 5}
    with serving(model, "--chat-template", str(tmp_path / "own.jinja")) as server:
        for value, prompt in ((True, "five"), (False, "one two")):
            body = {**fields, "chat_template_kwargs": {"enable_thinking": value, "messages": []}}
            _, answer = server.ask("POST", "/v1/chat/completions", body)
            plain = server.complete(prompt=prompt, temperature=0, max_tokens=5)
            assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
        status, answer = server.ask("POST", "/v1/chat/completions", {**fields, "chat_template_kwargs": [1]})
        assert status == 400 and "is not an object" in answer["error"]["message"]


def test_prompts_begin_as_the_tokenizer_says(serving: Start, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "small")
    file = with_prefix(tmp_path / "small/tokenizer.json", "[gMASK] <sop> $A", "[gMASK]", "<sop>")
    tokenizer = Tokenizer.load(file)
    ids = [*tokenizer.prefix(), *tokenizer.encode("five six")]
    fields = {"temperature": 0, "max_tokens": 8}
    with serving(tmp_path / "small") as server:
        expected = server.complete(prompt=[ids], **fields)["choices"][0]["text"]
        assert server.complete(prompt="five six", **fields)["choices"][0]["text"] == expected
        plain = server.complete(prompt=[ids[2:]], **fields)["choices"][0]["text"]
        answer = server.complete(prompt="five six", add_special_tokens=False, **fields)
        assert answer["choices"][0]["text"] == plain != expected
        assert server.ask("POST", "/tokenize", {"prompt": "five six"})[1]["tokens"] == ids
    with serving(tmp_path / "small", "--no-add-bos") as server:
        assert server.complete(prompt="five six", **fields)["choices"][0]["text"] == plain


def test_of_several_named_templates_chat_uses_the_default(
    serving: Start, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "small")
    named = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]
    (tmp_path / "small/tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    fields = {"temperature": 0, "max_tokens": 5}
    with serving(tmp_path / "small") as server:
        messages = [{"role": "user", "content": "one two"}]
        _, answer = server.ask("POST", "/v1/chat/completions", {**fields, "messages": messages})
        plain = server.complete(prompt="one two", **fields)
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"max_tokens": 1.5}, 400, "max_tokens"),
        ({"maxtokens": 5}, 400, "maxtokens"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": [[1, "a"]]}, 400, "prompt"),
        ({"prompt": [[300]]}, 400, "prompt"),
        ({"prompt": [[-1]]}, 400, "prompt"),
        ({"prompt": "one two three. " * 200}, 400, "prompt"),
        ({"prompt": ["a"] * 129}, 400, "prompt"),
        ({"logprobs": 1000}, 400, "logprobs"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, 400, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options"),
        ({"beam_width": 3, "n": 2}, 400, "n"),
        ({"best_of": 3}, 400, "best_of"),
        ({"stop": [1]}, 400, "stop"),
        ({"top_k": -5}, 400, "top_k"),
        ({"model": "other"}, 404, "model"),
    ],
)
def test_wrong_fields_are_refused_in_openais_shape(
    server: Server, changes: dict[str, Any], status: int, param: str
) -> None:
    found, answer = server.ask("POST", "/v1/completions", {"prompt": "one", **changes})
    assert found == status and set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param


def test_all_faults_of_a_request_are_named_at_once(server: Server) -> None:
    status, answer = server.ask("POST", "/v1/completions", {"temprature": 1, "top_p": 7, "n": -1})
    assert status == 400
    for part in (
        "temprature: unknown field; did you mean temperature?",
        "top_p: 7",
        "n: -1",
        "prompt: is missing",
    ):
        assert part in answer["error"]["message"]


def test_a_prompt_that_is_too_long_is_refused_with_what_to_send_instead(server: Server) -> None:
    long = [1] * 300
    status, answer = server.ask("POST", "/v1/completions", {"prompt": long})
    assert status == 400 and '"truncate": true' in answer["error"]["message"]
    assert server.complete(prompt=long, truncate=True, max_tokens=1)["usage"]["prompt_tokens"] == 256
    message = {"role": "user", "content": "one two " * 200}
    status, answer = server.ask("POST", "/v1/chat/completions", {"messages": [message]})
    assert status == 400 and "shorter messages" in answer["error"]["message"]
    status, answer = server.ask("PUT", "/api", {"prompts": ["one two " * 200]})
    assert status == 400 and answer["message"].endswith("shorten it")


def test_likely_tokens_of_a_chat_need_log_probabilities(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "one"}], "top_logprobs": 2}
    status, answer = server.ask("POST", "/v1/chat/completions", body)
    assert status == 400 and answer["error"]["param"] == "top_logprobs"


def test_every_page_answers_a_question_for_its_head(server: Server) -> None:
    for path in ("/", "/health", "/v1/models", "/metrics"):
        assert server.ask("HEAD", path) == (200, "")


def test_a_long_value_is_shortened_and_no_limit_may_be_minus_1(server: Server) -> None:
    _, answer = server.ask("POST", "/v1/completions", {"prompt": "one", "stop": ["a"] * 1000})
    assert len(answer["error"]["message"]) < 250 and "at most 64 texts" in answer["error"]["message"]
    assert server.ask("POST", "/v1/completions", {"prompt": "one", "top_k": -1, "max_tokens": 1})[0] == 200


def test_paths_methods_and_bodies_that_are_wrong(server: Server) -> None:
    assert server.ask("GET", "/nothing")[0] == 404
    status, answer = server.ask("GET", "/v1/completions")
    assert status == 405 and answer["error"]["message"] == "/v1/completions does not have GET: use POST"
    assert server.ask("POST", "/v1/models")[1]["error"]["message"].endswith("use GET")
    assert server.ask("POST", "/api", {"prompts": ["one"]}) == (
        405,
        {"message": "/api does not have POST: use PUT"},
    )
    for body in (b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 90_000):
        status, answer = server.ask("POST", "/v1/completions", body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert server.ask("POST", "/v1/completions", b" " * 100_001)[0] == 413


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/completions", b'{"prompt": "one \\ud800"}', "prompt"),
        ("/v1/completions", b'{"prompt": ["one", "\\uDFff two"]}', "prompt"),
        ("/v1/completions", b'{"prompt": "one", "stop": "\\ud83d"}', "stop"),
        ("/v1/completions", b'{"prompt": "one", "\\ud83d": 1}', None),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "messages"),
        ("/tokenize", b'{"prompt": "\\ud800"}', "prompt"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(
    server: Server, path: str, body: bytes, place: str | None
) -> None:
    status, answer = server.ask("POST", path, body)
    assert status == 400 and answer["error"]["param"] == place
    assert "half of a surrogate pair, \\ud" in answer["error"]["message"]


def test_a_whole_surrogate_pair_is_a_character(server: Server) -> None:
    body = b'{"prompt": "one \\ud83d\\ude00", "max_tokens": 0, "echo": true}'
    status, answer = server.ask("POST", "/v1/completions", body)
    assert status == 200 and answer["choices"][0]["text"] == "one \U0001f600"


def test_a_body_that_is_not_utf_8_names_the_byte(server: Server) -> None:
    _, answer = server.ask("POST", "/v1/completions", b'{"prompt": "\xff"}')
    assert answer["error"]["message"].startswith("the body is not UTF-8: byte 12")
    _, answer = server.ask("POST", "/v1/completions", b"[" * 90_000)
    assert answer["error"]["message"] == "the body is nested too deeply"


def test_the_prompt_of_a_list_that_is_wrong_is_named(server: Server) -> None:
    long = "one " * 400
    for prompts in (["one", long], [[1, 2], [1, 99999]]):
        _, answer = server.ask("POST", "/v1/completions", {"prompt": prompts})
        assert answer["error"]["message"].startswith("prompt[1]: ") and answer["error"]["param"] == "prompt"
    _, answer = server.ask("PUT", "/api", {"prompts": ["one", long]})
    assert answer["message"].startswith("prompts[1]: the prompt has ")


def test_each_fault_is_named_once(server: Server) -> None:
    _, answer = server.ask("POST", "/v1/completions", {"prompt": "one", "n": 500, "stop": [""]})
    assert answer["error"]["message"].split("; ") == [
        'stop: [""] is out of range: at most 64 texts of 1 to 1000 characters',
        "n: 500 is out of range: 1 to 128",
    ]
    _, answer = server.ask("POST", "/v1/completions", {"prompt": []})
    assert answer["error"]["message"] == "prompt: is an empty list: at least one prompt is needed"


def test_megatrons_api(server: Server, model: Path) -> None:
    body = {"prompts": ["one two", "five"], "tokens_to_generate": 6, "top_k": 1, "logprobs": True}
    status, answer = server.ask("PUT", "/api", body)
    assert status == 200 and set(answer) == {"text", "segments", "logprobs"}
    own = server.complete(prompt="one two", max_tokens=6, temperature=0)["choices"][0]["text"]
    assert answer["text"][0] == "one two" + own
    ids = Tokenizer.load(model).encode("one two")
    assert len(answer["segments"][0]) == len(answer["logprobs"][0]) + 1 >= len(ids) + 1
    scoring = {"prompts": ["one two"], "tokens_to_generate": 0, "logprobs": True}
    status, answer = server.ask("PUT", "/api", scoring)
    assert status == 200 and answer["text"] == ["one two"] and len(answer["logprobs"][0]) == len(ids) - 1
    status, answer = server.ask("PUT", "/api", {"prompts": ["one"], "beam_width": 3, "tokens_to_generate": 5})
    assert status == 200 and len(answer["text"]) == 3 and answer["scores"] == sorted(answer["scores"])[::-1]
    colon = {"prompts": ["one:"], "tokens_to_generate": 1, "top_k": 1, "prevent_newline_after_colon": True}
    assert not server.ask("PUT", "/api", colon)[1]["text"][0].endswith("\n")


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": None},
        {"prompts": "text"},
        {"prompts": []},
        {"prompts": ["a"] * 129},
        {"prompts": [""]},
        {"tokens_to_generate": 0},
        {"tokens_to_generate": -1},
        {"temperature": 0},
        {"temperature": 101},
        {"top_k": 1001},
        {"top_k": 2, "top_p": 0.5},
        {"top_p": 1.1},
        {"top_p_decay": 0.5},
        {"top_p": 0.5, "top_p_bound": 0.6},
        {"beam_width": 0},
        {"beam_width": 2, "prompts": ["a", "b"]},
        {"random_seed": -1},
        {"stop_token": 300},
        {"max_len": 5},
        {"add_BOS": 1},
        {"logprobs": "yes"},
    ],
)
def test_megatrons_rules_are_answered_with_400_and_a_message(server: Server, changes: dict[str, Any]) -> None:
    status, answer = server.ask("PUT", "/api", {"prompts": ["one"], **changes})
    assert status == 400 and isinstance(answer["message"], str)


def test_an_address_that_others_reach_needs_a_key(serving: Start, model: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="so an API key is needed"), serving(model, "--host", "0.0.0.0"):
        pass
    (tmp_path / "key").write_text("a secret key\n")
    with serving(model, "--host", "0.0.0.0", "--api-key-file", str(tmp_path / "key")) as server:
        assert server.ask("GET", "/health")[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            status, answer = server.ask("GET", "/v1/models", headers=headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        own = {"Authorization": "Bearer a secret key", "Host": "node1.example"}
        assert server.ask("GET", "/v1/models", headers=own)[0] == 200


def test_a_page_of_another_site_cannot_use_a_server_without_a_key(server: Server) -> None:
    body = {"prompt": "one", "max_tokens": 1}
    assert server.ask("POST", "/v1/completions", body, {"Origin": "https://evil.example"})[0] == 403
    own = {"Origin": f"http://127.0.0.1:{server.port}"}
    assert server.ask("POST", "/v1/completions", body, own)[0] == 200
    assert server.ask("POST", "/v1/completions", body, {"Origin": "http://["})[0] == 403


@pytest.mark.parametrize("host", ["evil.example:{port}", "203.0.113.5", "[", "", "localhost.evil.example"])
def test_without_a_key_only_requests_to_a_loopback_address_are_answered(server: Server, host: str) -> None:
    # The name of a stranger's site can lead to 127.0.0.1: then the browser sends it as Host and as Origin.
    host = host.format(port=server.port)
    for path in ("/", "/health", "/v1/models"):
        status, answer = server.ask("GET", path, headers={"Host": host, "Origin": f"http://{host}"})
        assert status == 403 and "not localhost" in answer["error"]["message"]


@pytest.mark.parametrize("host", ["localhost:9000", "LOCALHOST", "127.1.2.3", "[::1]:9000"])
def test_a_tunnel_with_another_port_is_answered(server: Server, host: str) -> None:
    assert server.ask("GET", "/health", headers={"Host": host, "Origin": f"http://{host}"})[0] == 200
