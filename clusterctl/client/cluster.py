"""A set of nodes as an object: select, run, push, pull, check, launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from clusterctl.checks import doctor, kinds
from clusterctl.client import function_run, launcher
from clusterctl.client.attempts import Launch, Resume, Target
from clusterctl.client.function_run import FunctionRun
from clusterctl.client.handover import Report, report_nothing
from clusterctl.client.node_choice import Choice
from clusterctl.client.run import Run, runs_folder
from clusterctl.client.session import Reach, Session
from clusterctl.client.sweep import QuietSweep, prepared
from clusterctl.errors import UsageError
from clusterctl.exec.command import Command
from clusterctl.finding import Finding
from clusterctl.hostfile import detect, formats, node_lists
from clusterctl.inventory import cluster as inventory
from clusterctl.inventory import nodeset
from clusterctl.inventory.cluster import Node
from clusterctl.jobs import job as jobs
from clusterctl.jobs import sweep as sweeps
from clusterctl.jobs.job import Job
from clusterctl.jobs.restarts import Restart
from clusterctl.jobs.run_folder import RunDir, make_runs, new_run_id
from clusterctl.jobs.sweep import Variant
from clusterctl.ranktable.api import RankTable
from clusterctl.ranktable.from_nodes import build_from_nodes
from clusterctl.settings import load_settings
from clusterctl.transfer import pull, push
from clusterctl.transfer.push import PushResult
from clusterctl.transfer.relay import relay_for
from clusterctl.transport.completed import Completed
from clusterctl.transport.fanout import Outcome

T = TypeVar("T")


class Cluster:
    """Nodes of an inventory, and the connections to them.

    Selections share the connections of the cluster that they come from. Close them with `close`, or use the cluster
    as a context manager.
    """

    def __init__(self, chosen: inventory.Cluster, session: Session, whole: inventory.Cluster | None) -> None:
        """Use `load`. `whole` is the inventory where `chosen` is a selection of it, else None."""
        self._chosen = chosen
        self._session = session
        self._whole = whole

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        *,
        kind: str | None = None,
        accept_new_host_keys: bool | None = None,
        ssh: str | None = None,
        connect_timeout: float | None = None,
        fanout: int | None = None,
    ) -> Cluster:
        """Return the cluster of a cluster.yaml, hostfile, node list or rank table.

        Without `path` the settings name the file: $CLUSTERCTL_CLUSTER, clusterctl.yaml, else ./cluster.yaml.
        `kind` is the kind of devices that a hostfile's slots are: cpu, cuda or npu.
        """
        settings = load_settings()
        chosen = detect.load(Path(path or settings.cluster), kind or settings.kind)
        reach = Reach(accept_new_host_keys, ssh, connect_timeout, fanout)
        return cls(chosen, Session(chosen, reach), None)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._chosen.nodes)

    def __repr__(self) -> str:
        return f"<Cluster {self._chosen.name}: {nodeset.fold(self.names)}>"

    def close(self) -> None:
        """Close the connections. Runs that were launched continue."""
        self._session.close()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self._chosen.nodes

    @property
    def names(self) -> list[str]:
        return self._chosen.names

    def select(self, nodes: str | None = None, exclude: str | None = None) -> Cluster:
        """Return the nodes of a node set such as "node[1-4]", "@group" or "node1,node3", in the inventory's order."""
        chosen = self._chosen.select(nodes, exclude)
        return Cluster(chosen, self._session, self._whole or self._chosen)

    # -- commands and files

    def run(
        self,
        command: Sequence[str],
        *,
        fill: bool = False,
        stdin: bytes | None = None,
        timeout: float | None = None,
        fanout: int | None = None,
    ) -> list[Outcome[Completed]]:
        """Run a command on every node; return one outcome per node, in order.

        The command is a list and passes through no shell. With `fill`, {node}, {n} and {address} in it are replaced
        by each node's own values. A node that cannot be reached is an outcome with an `error`; nothing is raised.
        """
        if isinstance(command, str):
            raise UsageError(f"{command!r} is text, not a list", 'as in run(["uname", "-n"])')
        prepared = Command(tuple(command), literal=not fill, timeout=timeout)
        numbers = {node.name: number for number, node in enumerate(self.nodes)}
        return self._session.connections().on_each(
            self.nodes,
            lambda node, link: link.run(
                prepared.on(node, numbers[node.name]), env=node.env, stdin=stdin, timeout=timeout
            ),
            fanout=fanout,
        )

    def push(
        self, source: str | Path, destination: str, *, replace: bool = False
    ) -> list[Outcome[PushResult]]:
        """Copy a folder or file to the same path on every node, verified; return one outcome per node.

        Only missing data is sent. With `replace`, a folder that clusterctl did not create is overwritten.
        """
        source = Path(source)
        if source.is_file():
            content, destination = push.file_source(source, destination)
        else:
            content = push.Source(source, push.make_manifest(source))
        with relay_for("auto", self.nodes) as relay:
            return self._session.connections().on_each(
                self.nodes,
                lambda node, link: push.push_tree(link, content, destination, replace=replace, relay=relay),
            )

    def pull(self, path: str, destination: str | Path) -> list[Outcome[PushResult]]:
        """Copy a folder or file of every node to DESTINATION/<node>/, verified; return one outcome per node."""
        folder = Path(destination)
        return self._session.connections().on_each(
            self.nodes,
            lambda node, link: pull.pull_tree(link, path, pull.pull_place(folder, node.name, path)),
        )

    def check(self) -> list[Finding]:
        """Run the checks of `clusterctl doctor` on the nodes; return every finding."""
        return doctor.nodes(self._chosen, self._session.connections())

    # -- rank tables and hostfiles

    def rank_table(
        self,
        *,
        devices: Sequence[int] | None = None,
        hardware: str | None = None,
        skip_incomplete: bool = False,
    ) -> RankTable:
        """Query every node for the addresses of its devices; return one rank table for all of them."""
        connections = self._session.connections()
        return build_from_nodes(self._chosen, connections, devices, hardware, skip_incomplete).table

    def hostfile(self, form: str = "deepspeed") -> str:
        """Return the nodes as a hostfile in a form such as "deepspeed"."""
        if form == node_lists.NODE_LISTS:
            return node_lists.render(list(detect.entries_of(self._chosen)))
        return formats.render(self._chosen, form)

    # -- runs

    def launch(
        self,
        job: str | Path | Sequence[str],
        *,
        overrides: Mapping[str, object] | None = None,
        devices: Sequence[int] | None = None,
        code: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        restarts: int | None = None,
        checks: bool = True,
        runs: str | Path | None = None,
        report: Report = report_nothing,
    ) -> Run:
        """Start a job file, or a command given as a list, and return its run.

        The run has a controller, a process of its own: it continues when this program ends. `overrides` changes keys
        of a job file ({"train.steps": 100}); `code` and `env` belong to a command.
        """
        if isinstance(job, (str, Path)):
            made = jobs.load(Path(job), [f"{key}={value}" for key, value in (overrides or {}).items()])
            jobs.refuse_secrets(env or {})
            made = replace(made, env={**made.env, **(env or {})})
        else:
            made = jobs.from_command(job, Path(code).resolve() if code is not None else None, env=env or {})
        if devices is not None:
            made = replace(made, devices=tuple(devices))
        if restarts is not None:
            made = replace(made, restart=replace(made.restart or Restart(), max=restarts))
        return self._start(made, checks, runs, report)

    def sweep(
        self,
        job: str | Path,
        values: Mapping[str, Sequence[object]],
        *,
        each: str | None = None,
        overrides: Mapping[str, object] | None = None,
        checks: bool = True,
        runs: str | Path | None = None,
    ) -> list[Variant]:
        """Run a job file once for each combination of values, as `clusterctl launch --sweep` does; wait for all runs.

        `values` has the values of each key. `each` ("nodes=N" or "devices=N") runs variants side by side. A variant
        whose run fails has a `problem`; nothing is raised, and the others go on.
        """
        texts = [f"{key}={','.join(map(sweeps.text_of, several))}" for key, several in values.items()]
        changed = tuple(f"{key}={value}" for key, value in (overrides or {}).items())
        request = sweeps.SweepRequest(
            job=str(Path(job).absolute()),
            cluster=str(Path(self._chosen.source).absolute()),
            nodes=self._selected,
            settings=changed,
            each=each,
            no_checks=not checks,
        )
        record = sweeps.SweepRecord(request, sweeps.variants_of(texts))

        def target_of(variant: Variant) -> Target:
            made = jobs.load(Path(job), [*changed, *variant.settings])
            return Target(made, *self._choice.of(made))

        targets = prepared(record, target_of)
        folder = make_runs(runs_folder(runs)) / new_run_id(f"{sweeps.PREFIX}{Path(job).stem}"[:40])
        sweep = QuietSweep(folder, record, targets, self._session.reach)
        sweep.run()
        return list(sweep.record.variants)

    def start_function(
        self,
        function: Callable[..., T],
        *args: object,
        devices: Sequence[int] | None = None,
        code: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        checks: bool = True,
        runs: str | Path | None = None,
        trust_results: bool = False,
        report: Report = report_nothing,
    ) -> FunctionRun[T]:
        """Start one call of a function per device and return its run; `results()` waits for what the calls return."""
        request = function_run.Request(devices, code, env or {}, trust_results)
        with request.files_of(function, args) as call:
            job = request.as_job(function, call)
            run = self._start(job, checks, runs, report)
        return function_run.FunctionRun(run, trust_results)

    def launch_function(
        self,
        function: Callable[..., T],
        *args: object,
        devices: Sequence[int] | None = None,
        code: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        checks: bool = True,
        runs: str | Path | None = None,
        trust_results: bool = False,
        report: Report = report_nothing,
    ) -> list[T]:
        """Call a function once per device of every node; return what the calls returned, in the order of the ranks.

        Raises FunctionFailed with every rank's traceback if a call raised. Pass keyword arguments of the function
        with functools.partial. After a timeout the run is stopped.
        """
        started = self.start_function(
            function,
            *args,
            devices=devices,
            code=code,
            env=env,
            checks=checks,
            runs=runs,
            trust_results=trust_results,
            report=report,
        )
        try:
            return started.results(timeout)
        except BaseException:
            started.stop_if_active()
            raise

    def _start(self, job: Job, checks: bool, runs: str | Path | None, report: Report) -> Run:
        """Check, push and start a job; return its run, which a controller process supervises from then on."""
        launch = Launch.of(Target(job, *self._choice.of(job)), runs_folder(runs), checks=checks)
        # The document only gives errors of the job file their place, and the job is checked.
        target = replace(launch.target, job=replace(launch.target.job, document=None))
        launcher.start(replace(launch, target=target), self._session.reach, report)
        return Run(launch.run, self._session.reach)

    @property
    def _selected(self) -> str | None:
        """The nodes of a selection, which replaces the job's own `nodes`."""
        return ",".join(self.names) if self._whole else None

    @property
    def _choice(self) -> Choice:
        return Choice((self._whole or self._chosen).select, self._selected, completed=self._completed)

    def _completed(self, chosen: inventory.Cluster) -> inventory.Cluster:
        """Return nodes with the kinds and devices that they report, where the inventory does not name them."""
        asks = any(node.is_asked for node in chosen.nodes)
        return kinds.completed(chosen, self._session.connections()) if asks else chosen


def resume(
    run: Run,
    *,
    on: Cluster | None = None,
    overrides: Mapping[str, object] | None = None,
    report: Report = report_nothing,
) -> Run:
    """Start an ended run again and return it; a training continues from its newest valid checkpoint.

    The nodes of `on`, where they are given, get its code, data and checkpoint; else a run of a batch system is
    submitted again. `overrides` changes keys of the training. A training with no steps left stays as it is.
    """
    again = Resume.of(RunDir(run.folder), [f"{key}={value}" for key, value in (overrides or {}).items()])
    if again.complete():
        return run
    again = replace(again, elsewhere=on._completed(on._chosen) if on else None)
    again.check()
    if again.resubmits:
        again.submit()
    else:
        launcher.start(again, run.reach, report)
    return run
