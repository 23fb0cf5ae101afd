"""The programs whose options are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterctl.migrate.found import Option, options_by_name, plain
from clusterctl.migrate.tables import (
    ascend,
    deepspeed,
    glm,
    launchers,
    megatron,
    mindformers,
    mindspeed,
    oneflow,
    preprocess,
    torchtitan,
    verbs,
)


@dataclass(frozen=True)
class Family:
    """The options of one program."""

    name: str
    title: str
    programs: tuple[str, ...]
    tables: tuple[str, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)
    verb: str = "job"

    def option(self, name: str) -> Option | None:
        """Return the row of an option; the first table that has it counts."""
        return next((row for table in self.tables if (row := options_by_name(table).get(plain(name)))), None)


FAMILIES = (
    Family(
        "oneflow",
        oneflow.TITLE,
        oneflow.PROGRAMS,
        (oneflow.OPTIONS, oneflow.CONTAINER, megatron.OPTIONS),
        oneflow.DEFAULTS,
    ),
    Family("glm", glm.TITLE, glm.PROGRAMS, (glm.OPTIONS, megatron.OPTIONS), glm.DEFAULTS),
    Family("ascend", ascend.TITLE, ascend.PROGRAMS, (ascend.OPTIONS,), {}),
    Family("ascend-glm", ascend.TITLE, ascend.GLM_PROGRAMS, (ascend.GLM, ascend.OPTIONS), {}),
    Family(
        "mindformers", mindformers.TITLE, mindformers.PROGRAMS, (mindformers.OPTIONS,), mindformers.DEFAULTS
    ),
    Family("torchtitan", torchtitan.TITLE, torchtitan.PROGRAMS, (torchtitan.OPTIONS,)),
    Family("preprocess", "preprocess_data.py", preprocess.PROGRAMS, (preprocess.OPTIONS,), verb="data"),
    Family("server", "a text generation server", verbs.SERVERS, verbs.TABLES["serve"], verb="serve"),
    Family("generator", "text generation", verbs.GENERATORS, verbs.TABLES["generate"], verb="generate"),
    Family("evaluator", "an evaluation", verbs.EVALUATORS, verbs.TABLES["eval"], verb="eval"),
    Family("converter", "a conversion of weights", verbs.CONVERTERS, verbs.TABLES["import"], verb="import"),
    Family(
        "megatron",
        megatron.TITLE,
        megatron.PROGRAMS,
        (megatron.OPTIONS, mindspeed.OPTIONS),
        megatron.DEFAULTS,
    ),
)
LAUNCHER = Family("launcher", "", (), (launchers.OPTIONS,))
KNOWN = ", ".join(name for family in FAMILIES for name in family.programs[:1])


def trained_option(name: str) -> Option | None:
    """Return the row of an option in the tables of programs and files that train."""
    keys = Family("keys", "", (), (mindformers.KEYS, deepspeed.KEYS))
    found = (family.option(name) for family in (*FAMILIES, LAUNCHER, keys) if family.verb == "job")
    return next((option for option in found if option is not None), None)
