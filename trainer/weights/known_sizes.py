"""Facts about a model that its tensors do not show: the number of heads, and how many token ids are padding."""

from __future__ import annotations

from trainer.config.model_sizes import GLM_VOCAB, GPT2_VOCAB, SIZES
from trainer.errors import InputError

# The token tables of GPT-2 and GLM, padded as by Megatron for one rank.
PADDED = {50304: {"gpt": GPT2_VOCAB, "glm": GLM_VOCAB}}


def heads_for(source: str, kind: str, layers: int, hidden: int, given: int) -> tuple[int, list[str]]:
    """Return the heads of a model whose file does not record them, and a note about their source."""
    if given:
        if hidden % given:
            problem = f"--heads is {given}, which does not divide the hidden size {hidden} of {source}"
            raise InputError(problem, "correct --heads")
        return given, []
    known = {
        model.heads
        for model in SIZES.values()
        if (model.kind, model.layers, model.hidden) == (kind, layers, hidden)
    }
    if len(known) == 1:
        heads = known.pop()
        return heads, [f"the file does not record the heads: {heads}, as in our named size of this shape"]
    if kind == "glm" and hidden % 64 == 0:
        heads = hidden // 64
        return heads, [f"the file does not record the heads: {heads}, of 64 numbers as in the published GLMs"]
    problem = f"{source}: does not record the number of attention heads"
    raise InputError(problem, "name it with --heads")


def vocab_for(kind: str, rows: int, given: int) -> tuple[int, list[str]]:
    """Return the size of the vocabulary without padding, and a note about its source."""
    if given:
        if given > rows:
            raise InputError(f"--vocab is {given}, but the token table has {rows} rows")
        return given, []
    found = PADDED.get(rows, {}).get(kind)
    if found is None:
        return rows, []
    return found, [
        f"the token table has {rows} rows; {found} of them are taken as the vocabulary (--vocab changes that)"
    ]
