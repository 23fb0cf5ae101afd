"""Read another program's config key by key; all faults are reported together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import CheckpointError

MOST_LAYERS = 10_000
_HARMLESS = """
_attn_implementation _attn_implementation_autoset _name_or_path architectures auto_map
bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout
cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop
embedding_dropout encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label is_decoder is_encoder_decoder label2id
length_penalty max_length max_window_layers min_length model_type name no_repeat_ngram_size num_beam_groups
num_beams num_return_sequences output_attentions output_hidden_states output_router_logits output_scores pad_token_id
prefix pretraining_tp problem_type pruned_heads remove_invalid_values reorder_and_upcast_attn repetition_penalty
return_dict return_dict_in_generate sep_token_id summary_activation summary_first_dropout summary_proj_to_labels
summary_type summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p unsloth_fixed unsloth_version
use_bfloat16 use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys of a config.json that do not change what a model computes from its weights."""


class Keys:
    """A config.json whose keys are read one by one; it collects the values that cannot be mapped."""

    def __init__(self, source: str, document: Mapping[str, object], faults: list[str] | None = None) -> None:
        """`faults`: a list that is shared with other keys of the same file."""
        self._source, self.document = source, document
        self.faults: list[str] = [] if faults is None else faults
        self._read = set[str]()

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that exists."""
        self._read.update(names)
        for name in names:
            if self.document.get(name) is not None:
                return self.document[name]
        return default

    def number(self, *names: str, default: int | None = None, least: int = 1, most: int = 1 << 24) -> int:
        """Return a whole number; add a fault if it is out of range."""
        value = self.get(*names, default=default)
        if type(value) is not int or not least <= value <= most:
            self.faults.append(f"{names[0]} is {value!r}: a whole number from {least} to {most:,} is needed")
            return 1
        return value

    def layers(self, *names: str, default: int | None = None) -> int:
        """Return a number of layers."""
        return self.number(*names, default=default, most=MOST_LAYERS)

    def real(self, *names: str, default: float) -> float:
        """Return a number of at least 0."""
        value = self.get(*names, default=default)
        if type(value) not in (int, float) or not 0 <= value < 1e12:
            self.faults.append(f"{names[0]} is {value!r}: a number is needed")
            return default
        return float(value)

    def by_name(self, name: str) -> dict[str, float]:
        """Return an object of positive numbers; add a fault if it is something else."""
        value = self.get(name, default={})
        if isinstance(value, dict) and all(type(n) in (int, float) and 0 < n < 1e12 for n in value.values()):
            return value
        self.faults.append(f"{name} is {value!r}: positive numbers by name are needed")
        return {}

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Return our name for a key's value; add a fault if there is none."""
        value = self.get(name, default=default)
        if not isinstance(value, str) or value not in choices:
            self.faults.append(f"{name} is {value!r}: only {', '.join(choices)} can be mapped")
            return next(iter(choices.values()))
        return choices[value]

    def must_be(self, name: str, wanted: object, default: object, reason: str) -> None:
        """Add a fault if a key has another value than the one that can be mapped."""
        value = self.get(name, default=default)
        if value != wanted:
            self.faults.append(f"{name} is {value!r}: {reason}")

    def unread(self) -> list[str]:
        """Return the keys with a value that nothing has read and that may mean something."""
        given = {name for name, value in self.document.items() if value is not None}
        return sorted(given - self._read - HARMLESS)

    def check(self) -> None:
        """Raise a CheckpointError that lists all faults."""
        if self.faults:
            problem = "\n".join(f"{self._source}: {fault}" for fault in self.faults)
            raise CheckpointError(problem, "this variant of the model cannot be mapped to ours")
