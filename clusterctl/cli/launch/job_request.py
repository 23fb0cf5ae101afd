"""The request of a command line: a job file or a command, the nodes, and changes for this run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.cli.choices import at_option
from clusterctl.cli.declared import argument, flag, option
from clusterctl.cli.options import JOB_FILES, NodeOptions, complete_jobs
from clusterctl.client.node_choice import Choice
from clusterctl.errors import Collected, UsageError, did_you_mean

if TYPE_CHECKING:
    from clusterctl.jobs.job import Job
    from clusterctl.jobs.what_if import WhatIf


@dataclass(frozen=True)
class JobRequest(NodeOptions):
    """The options of `plan` and `launch` that say what runs where."""

    words: list[str] | None = argument(
        "A job file (YAML), or a command after `--`.",
        metavar="JOB | -- COMMAND...",
        autocompletion=complete_jobs,
    )
    include: str | None = option(
        "Use only these devices, in DeepSpeed's notation: w0@w1:0,2.", "--include", "-i", metavar="FILTER"
    )
    overrides: list[str] | None = option(
        "Override a key of the job file: --set train.steps=100.", "--set", metavar="KEY=VALUE"
    )
    devices: str | None = option(
        'Devices to use on each node: 2 (a number), "[0,4)" (4 is excluded), 0,3.', metavar="RANGE"
    )
    code: Path | None = option(
        "The folder to push and to start in. Default: the current folder.", metavar="DIR"
    )
    no_code: bool = flag("Do not push a folder.")
    keep_workdir: bool = flag("Start in the folder of earlier runs of this name.")
    env: list[str] | None = option(
        "Set an environment variable. NAME alone passes yours on, and is never recorded.",
        metavar="NAME=VALUE",
    )
    per_node: bool = flag("Start it once per node, instead of once per device.")
    env_style: str | None = option(
        "Also set the variables of torchrun (default), mindspore or mpi.", metavar="STYLE"
    )

    def with_what_if(self, imagined: WhatIf) -> JobRequest:
        """Return the request for a plan on imaginary nodes, where the folders of the job need not exist."""
        from clusterctl.jobs import what_if

        if self.nodes or self.exclude or self.include:
            raise UsageError(
                "--what-if plans for imaginary nodes", "leave out --nodes, --exclude and --include"
            )
        if not self.words or len(self.words) != 1:
            return self
        return replace(
            self, overrides=[*what_if.without_folders(Path(self.words[0])), *(self.overrides or ())]
        )

    def choice(
        self, imagined: WhatIf | None = None, *, asks: bool = False, accept_new: bool = False
    ) -> Choice:
        """Return how the nodes of the job are chosen; with `asks`, nodes tell what the inventory does not name."""
        return replace(self.choose(asks, accept_new), include=self.include, what_if=imagined)

    def job(self, choice: Choice) -> Job:
        """Return the job: a job file, or a command."""
        from clusterctl.inventory.cluster import named_devices
        from clusterctl.jobs import job as jobs

        argv, errors = self.words or [], Collected()
        with errors, at_option("--devices"):
            devices = None if self.devices is None else named_devices(self.devices)
        with errors:
            self._refuse_env_style()
        with errors:
            self._refuse_words(argv)
        if not argv:
            errors.raise_all()
        if argv[0].endswith(JOB_FILES):
            with errors:
                self._refuse_command_options(argv[0])
            with errors:
                job = jobs.load(Path(argv[0]), self.overrides or (), choice.faults)
            errors.raise_all()
            job = self._changed(job)
            return job if devices is None else replace(job, devices=devices)
        with errors:
            code = None if self.no_code else self._code_folder()
        pairs = []
        for text in self.env or ():
            with errors:
                pairs.append(_pair(text))
        errors.raise_all()
        given = {name: value for name, value in pairs if value is not None}
        job = jobs.from_command(argv, code, self.devices, given)
        job = replace(job, workdir="keep" if self.keep_workdir else "new")
        return self._changed(replace(job, forward=tuple(name for name, value in pairs if value is None)))

    def _refuse_words(self, argv: Sequence[str]) -> None:
        """Raise a UsageError for words that are neither one job file nor a command, and for options that do not fit."""
        if not argv:
            raise UsageError(
                "no job file and no command given",
                "name a job file, as in job.yaml, or a command after `--`, as in -n node[1-2] -- python train.py",
            )
        if argv[0].endswith(JOB_FILES):
            if len(argv) > 1:
                raise UsageError(
                    f"{argv[0]} is a job file; {argv[1]!r} is one word too many",
                    "change keys of a job with --set; give either a job file or a command",
                )
            return
        if argv[0] == "-":
            raise UsageError("-: a job is not read from standard input", "write it to a file: job.yaml")
        if not argv[0].strip():
            raise UsageError(
                "the command is empty", "name a program after `--`; is a variable of the shell unset?"
            )
        if self.overrides:
            raise UsageError(
                "--set needs a job file", "pass settings of a command as its own arguments, after `--`"
            )
        if self.code and self.no_code:
            raise UsageError("--code and --no-code contradict each other", "leave out one of them")

    def _refuse_command_options(self, job_file: str) -> None:
        """Raise a UsageError for options that a job file has as keys."""
        remedies = {
            "--code": (self.code, "--set code=DIR"),
            "--no-code": (self.no_code, "leave `code` out of the file"),
            "--keep-workdir": (self.keep_workdir, "--set workdir=keep"),
            "--env": (self.env, "--set env.NAME=VALUE"),
        }
        given = [name for name, (value, _) in remedies.items() if value]
        if given:
            remedy = "; ".join(remedies[name][1] for name in given)
            raise UsageError(f"{', '.join(given)} is for a command, and {job_file} is a job file", remedy)

    def _refuse_env_style(self) -> None:
        """Raise a UsageError for an unknown `--env-style`."""
        from clusterctl.jobs.job import ENV_STYLES

        if self.env_style and self.env_style not in ENV_STYLES:
            near = did_you_mean(self.env_style, ENV_STYLES) or f"one of {', '.join(ENV_STYLES)}"
            raise UsageError(f"--env-style {self.env_style}: unknown", near)

    def _changed(self, job: Job) -> Job:
        """Return the job with the values of `--per-node` and `--env-style`."""
        job = replace(job, env_style=self.env_style) if self.env_style else job
        return replace(job, processes="node") if self.per_node else job

    def _code_folder(self) -> Path:
        folder = (self.code or Path.cwd()).resolve()
        if not folder.is_dir():
            raise UsageError(f"--code {folder}: no such folder", "give the folder that the command starts in")
        if self.code is None and folder in (Path.home().resolve(), Path(folder.anchor)):
            raise UsageError(
                f"this would push all of {folder} to the nodes",
                "give the folder with --code DIR, or use --no-code to push nothing",
            )
        return folder


def _pair(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not (name.isascii() and name.isidentifier()):
        raise UsageError(f"--env {name or text}: expected NAME=VALUE", "for example --env NCCL_DEBUG=INFO")
    return name, value if equals else None
