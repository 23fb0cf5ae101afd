"""What differs between the layers of a decoder: which of them have an attention window, and which rotate."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.weights.families.rope import GLOBAL, LOCAL
from trainer.weights.keys import Keys


def read_window(keys: Keys, layers: int, usual: int | None, cycle: int) -> tuple[int, tuple[int, ...]]:
    """Return the attention window and our `windowed`.

    usual: the window if config.json does not contain the key; None: the family has no windows. cycle: every layer of
    this number attends to all tokens if config.json has no `layer_types`; 0: all layers are alike.
    """
    given = keys.get("layer_types", default=[])
    kinds = [str(each) for each in given] if isinstance(given, list) else ["?"]
    # Only an explicit null is no window.
    usual_size = 0 if "sliding_window" in keys.document else usual or 0
    window = 0 if usual is None else keys.number("sliding_window", default=usual_size, least=0)
    if not cycle:
        wanted = {LOCAL} if window else {GLOBAL}
        if set(kinds) - wanted or (usual is None and keys.get("use_sliding_window", default=False)):
            keys.faults.append("layer_types or use_sliding_window: our layers all have the same window")
        return window, ()
    every = keys.number("sliding_window_pattern", default=cycle)
    marks = [int(each == LOCAL) for each in kinds] or [int((at + 1) % every != 0) for at in range(layers)]
    if len(marks) != layers or set(kinds) - {LOCAL, GLOBAL} or (any(marks) and not window):
        problem = f"{LOCAL}, which needs sliding_window, or {GLOBAL} for each of {layers} layers is needed"
        keys.faults.append(f"layer_types is {given!r}: {problem}")
        return 0, ()
    return (window, shortest(marks)) if any(marks) else (0, ())


def read_rotated(keys: Keys, layers: int) -> tuple[int, ...]:
    """Return our `rotated`."""
    every = keys.number("no_rope_layer_interval", default=4)
    given = keys.get("no_rope_layers", default=[int((at + 1) % every != 0) for at in range(layers)])
    if not isinstance(given, list) or len(given) != layers or any(mark not in (0, 1) for mark in given):
        keys.faults.append(f"no_rope_layers is {given!r}: 0 or 1 for each of {layers} layers is needed")
        return ()
    return shortest(given)


def shortest(marks: Sequence[int]) -> tuple[int, ...]:
    """Return the shortest cycle that repeats to these marks; () if all are 1."""
    sizes = (
        size for size in range(1, len(marks)) if all(m == marks[at % size] for at, m in enumerate(marks))
    )
    return () if all(marks) else tuple(marks[: next(sizes, len(marks))])
