"""Low-rank adapters (LoRA): which matrices of a model get one, and how many parameters these have. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from clusterctl.wire.fields import closest_match, setting
from trainer.config.model import ModelConfig
from trainer.errors import Fault

# The matrix and the sections of each target; `all`: one adapter for all sections of the matrix together.
TARGETS: dict[str, tuple[str, str]] = {
    "qkv": ("attention.qkv", "all"),
    "q": ("attention.qkv", "q"),
    "k": ("attention.qkv", "k"),
    "v": ("attention.qkv", "v"),
    "out": ("attention.out", "all"),
    "gate_up": ("feed_forward.up", "all"),
    "gate": ("feed_forward.up", "gate"),
    "up": ("feed_forward.up", "up"),
    "down": ("feed_forward.down", "all"),
}
# With experts: the shared part of a block, which every token passes through.
SHARED = "shared"
# Hugging Face's names of modules.
ALIASES = {
    **{f"{name}_proj": (name,) for name in ("q", "k", "v", "gate", "up", "down", "gate_up")},
    "o_proj": ("out",),
    "c_attn": ("qkv",),
    "query_key_value": ("qkv",),
    "c_fc": ("up",),
    "dense_h_to_4h": ("up",),
    "dense_4h_to_h": ("down",),
    "dense": ("out",),
    "attn.c_proj": ("out",),
    "mlp.c_proj": ("down",),
    "c_proj": ("out", "down"),
    # Mixtral's.
    "w1": ("gate",),
    "w3": ("up",),
    "w2": ("down",),
}


@dataclass(frozen=True)
class LoraConfig:
    """Adapters: low-rank matrices that are added to the weights and learned instead of them."""

    rank: int = setting(0, least=0)
    """Rank of each adapter; 0: no adapters, all weights are learned."""
    alpha: float = setting(16.0, above=0.0)
    """An adapter's product is multiplied by alpha / rank."""
    dropout: float = setting(0.0, least=0.0, below=1.0)
    """Probability of dropping an input of an adapter, in training only."""
    targets: tuple[str, ...] = setting(())
    """Matrices with an adapter: q, k, v, qkv, out, gate, up, gate_up, down, `all`, or Hugging Face's names of them. By
    default q and v, or qkv if the family has one matrix for them, as in PEFT. Each expert has its own adapters."""

    @property
    def scale(self) -> float:
        """Return the factor of an adapter's product."""
        return self.alpha / self.rank


def module_of(path: str) -> str:
    """Return the module within its block of a parameter's name."""
    return ".".join(path.split(".")[2:-1])


def layer_of(model: ModelConfig, path: str) -> ModelConfig:
    """Return the config of the layer of a parameter's name; that of the model for one outside of the layers."""
    parts = path.split(".")
    return model.each_layer[int(parts[1])] if parts[0] == "blocks" else model


def is_split(model: ModelConfig) -> bool:
    """Return whether Hugging Face's form of a model has queries, keys and values as three matrices."""
    return model.norm != "layer" or model.groups != model.heads


def modules_of(model: ModelConfig, module: str) -> tuple[str, ...]:
    """Return the modules of a block that a target selects: with experts, also the shared part."""
    part, _, matrix = module.partition(".")
    shared = part == "feed_forward" and model.shared_ffn
    return (module, f"{part}.{SHARED}.{matrix}") if shared else (module,)


def is_of_experts(model: ModelConfig, module: str) -> bool:
    """Return whether a module has a matrix for each expert."""
    return model.experts > 0 and module in ("feed_forward.up", "feed_forward.down")


def sections_of(model: ModelConfig, module: str) -> dict[str, int]:
    """Return the outputs of each section of a matrix, under their names."""
    if module == "attention.qkv":
        return model.attention.sections
    if module.startswith("feed_forward.") and module.endswith(".up"):
        inner = model.shared_ffn if SHARED in module else model.inner
        return {"gate": inner, "up": inner} if model.swiglu else {"up": inner}
    return {"all": model.hidden}


def inputs_of(model: ModelConfig, module: str) -> int:
    """Return the inputs of a matrix."""
    widths = {
        "attention.out": model.attention.width,
        "feed_forward.down": model.inner,
        f"feed_forward.{SHARED}.down": model.shared_ffn,
    }
    return widths.get(module, model.hidden)


def adapted(model: ModelConfig, lora: LoraConfig) -> dict[str, tuple[str, ...]]:
    """Return the sections with an adapter of each matrix of a block; raise ValueError for a target that is unknown."""
    names = list[str]()
    wanted = lora.targets or (("q", "v") if is_split(model) else ("qkv",))
    for target in wanted:
        if target in ("all", "all-linear"):
            names += ["q", "k", "v"] if is_split(model) else ["qkv"]
            names += ["out", "gate", "up", "down"] if model.swiglu else ["out", "up", "down"]
        elif target in TARGETS or target in ALIASES:
            names += ALIASES.get(target, (target,))
        else:
            raise ValueError(f"there is no matrix {target!r} ({closest_match(target, [*TARGETS, *ALIASES])})")
    found: dict[str, tuple[str, ...]] = {}
    for name in dict.fromkeys(names):
        module, section = TARGETS[name]
        sections = sections_of(model, module)
        if section != "all" and section not in sections:
            raise ValueError(f"this model has no {name}: its feed-forward part has no gate")
        section = "all" if len(sections) == 1 else section
        for path in modules_of(model, module):
            found[path] = (*found.get(path, ()), section)
    for module, chosen in found.items():
        if "all" in chosen and len(set(chosen)) > 1:
            raise ValueError(f"{module} gets an adapter as a whole and for parts of it: keep one")
        order = ["all", *sections_of(model, module)]
        found[module] = tuple(sorted(set(chosen), key=order.index))
    return found


def adapter_shapes(
    model: ModelConfig, lora: LoraConfig
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield each adapter of a block: its name, and the shapes of its two matrices, of experts those of all."""
    for module, chosen in adapted(model, lora).items():
        sections = sections_of(model, module)
        each = (model.experts,) if is_of_experts(model, module) else ()
        for section in chosen:
            outputs = sum(sections.values()) if section == "all" else sections[section]
            first, second = (lora.rank, inputs_of(model, module)), (outputs, lora.rank)
            yield f"{module}.adapter.{section}", (*each, *first), (*each, *second)


def adapter_parameters(model: ModelConfig, lora: LoraConfig, tensor: int = 1) -> int:
    """Return the numbers of a block's adapters on one of `tensor` ranks."""
    count = 0
    for name, (*each, rank, inputs), (*_, outputs, _) in adapter_shapes(model, lora):
        if each:
            count += prod(each) * rank * (inputs + outputs) // tensor
            continue
        rows = name.startswith("attention.out") or ".down." in name
        count += rank * (inputs // tensor + outputs if rows else inputs + outputs // tensor)
    return count


def lora_faults(model: ModelConfig, lora: LoraConfig) -> Iterator[Fault]:
    """Yield the faults of adapters on a model."""
    if not lora.rank:
        if lora.targets or lora.dropout:
            yield Fault("train.tune.lora.rank", "is 0, which is no adapter", "use a rank such as 8")
        return
    if model.dense_layers or model.expert_bias or model.kv_rank:
        problem = "there are no adapters for models with dense_layers, expert_bias or kv_rank"
        yield Fault("train.tune.lora.rank", problem, "leave lora out, or use another model")
    try:
        adapted(model, lora)
    except ValueError as error:
        yield Fault("train.tune.lora.targets", str(error))
