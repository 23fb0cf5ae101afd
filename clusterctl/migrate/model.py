"""Combine options that together describe a model: its norms, positions, experts, window, and the task it learns."""

from __future__ import annotations

import re

from clusterctl.migrate.tables.mindformers import ARCHITECTURES
from clusterctl.migrate.tables.torchtitan import PRESETS
from clusterctl.migrate.translation import Facts, Translation, current, leave_out, number, of, wrong


def set_model(result: Translation, facts: Facts) -> None:
    _architecture(result, facts)
    positions = str(of(facts, "positions") or "")
    if positions == "rope":
        result.set("train.model.rotary", True, f"{facts['positions'][1]} rope")
    elif positions not in ("", "learned_absolute", "learned"):
        leave_out(result, facts, "positions", f"positions of kind {positions} are not supported")
    norm = str(of(facts, "normalization") or "")
    if norm == "RMSNorm":
        result.set("train.model.norm", "rms", f"{facts['normalization'][1]} {norm}")
    if of(facts, "qkv_bias") and "train.model.bias" in result.values:
        result.set("train.model.bias", "qkv", facts["qkv_bias"][1])
    if "expand" in facts:
        hidden = int(current(result, "train.model.hidden", 0))
        result.set("train.model.ffn", int(number(facts, "expand")) * hidden, facts["expand"][1])
    _titan(result, facts)
    _experts(result, facts)
    _rope(result, facts)
    act = str(of(facts, "activation") or "")
    if act and "train.model.swiglu" not in result.values:
        exact = act in ("gelu_erf", "gelu_exact")
        result.set(
            "train.model.activation", "gelu" if exact else "gelu_tanh", f"{facts['activation'][1]} {act}"
        )
        if act not in ("gelu", "fast_gelu", "gelu_tanh", "gelu_erf", "gelu_exact"):
            leave_out(result, facts, "activation", f"{act} is not supported; gelu_tanh is used instead")
    kind = result.values.get("train.model.kind")
    is_glm = result.found.family == "glm" or (kind is not None and kind.value == "glm")
    if "train.model.vocab" not in result.values and result.found.family in ("megatron", "oneflow", "glm"):
        vocab = 50_257 + 9 * is_glm
        result.set("train.model.vocab", vocab, "GPT-2's vocabulary; correct it for another one")


def _architecture(result: Translation, facts: Facts) -> None:
    """Set what the architecture of a MindFormers model means; refuse one that no model here has."""
    fact = next(
        (facts[name] for name in ("architecture", "config_type") if name in facts), ("GPT2Config", "")
    )
    name = str(fact[0][0] if isinstance(fact[0], list) and fact[0] else fact[0])
    if name in ("GPT2LMHeadModel", "GPT2Config"):
        return
    values = ARCHITECTURES.get(name.replace("Config", "ForCausalLM"))
    if values is None:
        known = ", ".join(("GPT2LMHeadModel", *ARCHITECTURES))
        raise wrong(result, fact[1], f"{name} is not trained here", f"architectures: {known}")
    for key, value in values.items():
        if key not in result.values:
            result.set(key, value, f"{fact[1]} {name}"[:80])
    hidden = int(current(result, "train.model.hidden", 0))
    if "train.model.ffn" not in result.values and hidden:
        # 2/3 of four times the width, times ffn_dim_multiplier, rounded up to multiple_of.
        factor, multiple = number(facts, "ffn_multiplier"), int(number(facts, "ffn_multiple") or 256)
        width = int(2 * (int((factor + 0.01) * 4 * hidden) if factor else 4 * hidden) / 3)
        result.set("train.model.ffn", -(-width // multiple) * multiple, "MindFormers' width of a gated layer")


def _titan(result: Translation, facts: Facts) -> None:
    """Set what torchtitan's keys mean together: the preset of a model, sharded ranks, recomputation, the batch."""
    if "titan_model" not in facts:
        return
    flavor = of(facts, "titan_flavor") or "(no flavor)"
    name = f"{facts['titan_model'][0]} {flavor}"
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise wrong(result, facts["titan_model"][1], f"there is no model {name} here", f"models: {known}")
    result.set("train.model.name", PRESETS[name], f"model.name, model.flavor {name}")
    if number(facts, "titan_shards") != 1:
        result.set("train.zero", 3, facts["titan_shards"][1] if "titan_shards" in facts else "FSDP")
    mode = str(of(facts, "titan_recompute") or "selective")
    if mode in ("full", "selective"):
        result.set("train.recompute.mode", mode, "activation_checkpoint.mode")
    if number(facts, "titan_batch") > 0:
        result.set("train.global_batch", int(number(facts, "titan_batch")), facts["titan_batch"][1])
    if of(facts, "titan_saving") is False:
        result.values.pop("train.save.every", None)
    if not of(facts, "titan_validation"):
        result.values.pop("train.eval.every", None)
        result.values.pop("train.eval.batches", None)


def _experts(result: Translation, facts: Facts) -> None:
    """Set the experts, if every layer has the same number of them."""
    counts = of(facts, "expert_counts")
    numbers = {str(count) for count in counts} if isinstance(counts, list) else set()
    if numbers and numbers != {"1"}:
        name = facts["expert_counts"][1]
        if len(numbers) > 1 or not str(next(iter(numbers))).isdigit():
            raise wrong(
                result, name, f"is {' '.join(sorted(numbers))}", "layers have one number of experts here"
            )
        result.set("train.model.experts", int(next(iter(numbers))), name)
        for fact in ("dense_layers", "expert_layers"):
            if _sparse(of(facts, fact)):
                problem = f"is {of(facts, fact)}: only some of its layers have experts"
                raise wrong(result, facts[fact][1], problem, "such a model is not trained here")
        if "expert_width" in facts:
            result.set("train.model.ffn", int(number(facts, "expert_width")), facts["expert_width"][1])
        if number(facts, "shared_experts"):
            width = int(number(facts, "shared_experts") * current(result, "train.model.ffn", 0))
            result.set("train.model.shared_ffn", width, facts["shared_experts"][1])
    if str(of(facts, "router_score") or "softmax") != "softmax":
        raise wrong(result, facts["router_score"][1], "is not softmax", "such a model is not trained here")


def _sparse(value: object) -> bool:
    """Return whether an option says that some layers have no experts."""
    text = str(value if value is not None else "0").strip()
    return text not in ("0", "1", "-1", "[1]") and not re.fullmatch(r"\(?\[1\]\s*\*\s*\d+\)?", text)


def _rope(result: Translation, facts: Facts) -> None:
    kind = str(of(facts, "rope_scaling") or "").lower()
    # MindFormers' name.
    kind = "linear" if kind == "pi" else kind
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        result.set("train.model.rope.scaling", kind, facts["rope_scaling"][1])
    elif kind not in ("", "none", "rope", "plain"):
        raise wrong(result, facts["rope_scaling"][1], f"there is no scaling {kind!r}", "see train.model.rope")
    else:
        for key in ("factor", "original", "low_freq", "high_freq", "beta_fast", "beta_slow"):
            result.values.pop(f"train.model.rope.{key}", None)
    window = of(facts, "window")
    if isinstance(window, list) and window:
        digits = re.findall(r"\d+", " ".join(map(str, window)))
        if digits:
            # Megatron counts the tokens before the own one.
            result.set("train.model.window", int(digits[0]) + ("," in str(window[0])), facts["window"][1])


def set_task(result: Translation, facts: Facts) -> None:
    """Set the task of a training after the pretraining: MindSpeed's stages."""
    stage = str(of(facts, "stage") or "")
    tasks = {"sft": "chat", "dpo": "dpo"}
    if stage in tasks:
        for key in ("prefix", "blend"):
            result.values.pop(f"train.data.{key}", None)
        result.values.pop("train.data.split", None)
        result.set("train.tune.task", tasks[stage], f"{facts['stage'][1]} {stage}")
        result.set("train.tune.train", "{data}/train.jsonl", "conversations as JSON lines")
    elif stage not in ("", "pt"):
        raise wrong(
            result, facts["stage"][1], f"there is no task for {stage!r}", "tasks: chat, dpo, classify"
        )
    names = {"linear_qkv": "qkv", "linear_proj": "out", "linear_fc1": "gate_up", "linear_fc2": "down"}
    targets = of(facts, "lora_targets")
    if isinstance(targets, list):
        known = [names.get(str(name), str(name)) for name in targets]
        result.set("train.tune.lora.targets", known, facts["lora_targets"][1])
