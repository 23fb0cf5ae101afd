"""The JSON schema of job files: the launcher's keys, and the `train` part as the trainer defines it."""

from __future__ import annotations

from clusterctl.inventory.cluster import KINDS
from clusterctl.inventory.container import RUNTIMES
from clusterctl.jobs.ask_trainer import ask_trainer
from clusterctl.jobs.job import (
    COLLECT_CHOICES,
    DEVICE_ID_CHOICES,
    ENV_STYLES,
    PROCESS_CHOICES,
)
from clusterctl.jobs.parts import own_table
from clusterctl.jobs.parts.interconnect import RDMA_CHOICES, TUNING
from clusterctl.jobs.parts.pods import CHIPS, CODE_CHOICES
from clusterctl.jobs.parts.read_restart import GROW_CHOICES
from clusterctl.jobs.parts.workdir import WORKDIR_CHOICES

# A part of a JSON schema; it is written, never read.
Schema = dict[str, object]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number", "minimum": 0}
TIME: Schema = {"anyOf": [NUMBER, TEXT | {"pattern": "^([0-9.]+(ms|s|m|h|d)?|off)$"}]}
NAME: Schema = TEXT | {"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$"}
DEVICES: Schema = {"type": ["string", "integer", "array"]}
WORDS: Schema = {"type": "array", "items": {"type": ["string", "number", "boolean"]}}


def job_schema() -> Schema:
    """Return the JSON schema of a job file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "clusterctl job",
        "type": "object",
        "properties": {**_own(), "train": ask_trainer(dict, ["schema"])},
        "additionalProperties": False,
        "oneOf": [{"required": ["command"]}, {"required": ["train"]}],
    }


def _own() -> Schema:
    keys: dict[str, tuple[Schema, str]] = {
        "name": (NAME, "Name of the runs. Default: the name of the file."),
        "command": (WORDS, "Your own program, as a list of words. A job has either `command` or `train`."),
        "nodes": (TEXT, "Node set of the run: node[1-4], @group. Default: all nodes."),
        "devices": (DEVICES, "Devices to use on each node, for example [0,4). Each device gets one rank."),
        "device_ids": (
            {"enum": list(DEVICE_ID_CHOICES)},
            "DEVICE_ID on NPUs. visible: index in ASCEND_RT_VISIBLE_DEVICES. physical: physical id, without that list.",
        ),
        "code": (TEXT, "Folder to push. The ranks start in a copy of it."),
        "data": (
            TEXT,
            "Folder with data to push, or s3://BUCKET/FOLDER or obs://BUCKET/FOLDER, which each node fetches. `{data}` "
            "in the job is its path on each node.",
        ),
        "data_there": (
            TEXT,
            "Folder with data that is on all nodes already. It is compared, not pushed.",
        ),
        "storage": (
            _storage(),
            "How object stores are reached. Access keys come from the environment or a file and are never recorded.",
        ),
        "processes": (
            {"enum": list(PROCESS_CHOICES)},
            "What gets a process: each device; each node; each node, where a launcher starts the ranks. auto: launcher"
            " if one such as torchrun is found in the command or its scripts, else device.",
        ),
        "env": (
            {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
            "Environment variables of the ranks. {node.address} and the like are replaced for each rank.",
        ),
        "setup": (
            _setup(),
            "What each node's shell runs before the ranks start: a file to source, commands, or a mapping of both.",
        ),
        "env_style": (
            {"enum": list(ENV_STYLES)},
            "Launcher whose variables are also set, next to RANK, WORLD_SIZE, MASTER_ADDR and the like.",
        ),
        "forward": (WORDS, "Variables of the launcher's environment to pass on to the ranks."),
        "rank_table": (
            {"anyOf": [{"enum": list(own_table.CHOICES)}, TEXT | {"pattern": "/|[.]json$"}]},
            "Whether the run gets a rank table. auto: on NPUs only. Or a table to use: ./table.json.",
        ),
        "master_port": (
            {"type": "integer", "minimum": 0, "maximum": 65535},
            "Port of the rendezvous. 0: any free port.",
        ),
        "collect": (
            {"type": "array", "items": {"enum": list(COLLECT_CHOICES)}},
            "What to fetch from the nodes in addition to logs and metrics.",
        ),
        "share_devices": ({"type": "boolean"}, "Allow devices that another run is using."),
        **_around(),
    }
    return {key: {**schema, "description": text} for key, (schema, text) in keys.items()}


def _around() -> dict[str, tuple[Schema, str]]:
    """Return the keys that concern the entire run: its folder, failures, the network, the platform of the nodes."""
    return {
        "log_limit": (
            {"type": ["string", "boolean"]},
            "Size of each log of a rank, on its node and here, such as 2GB. Beyond it, the middle is dropped. Default:"
            " 256 MiB; off: no limit.",
        ),
        "workdir": (
            {"enum": list(WORKDIR_CHOICES)},
            "Folder in which a program starts. new: one for each run, which `resume` uses again. keep: one for all runs"
            " of this name; pushed files that changed are replaced in it.",
        ),
        "grace": (
            NUMBER,
            "Seconds between SIGTERM and SIGKILL, for a last checkpoint. Default: 30, and for a training at least 1.5"
            " times the planned step and save; fewer than these are refused, except 0.",
        ),
        "restart": (_restart(), "Restart the run after a failure."),
        "network": (_network(), "How ranks on different nodes communicate."),
        "slurm": (_slurm(), "What `clusterctl submit slurm` asks Slurm for."),
        "kubernetes": (_kubernetes(), "What `clusterctl submit k8s` asks Kubernetes for."),
        "modelarts": (_modelarts(), "What `clusterctl submit modelarts` asks ModelArts for."),
        "container": (container(), "The container for the ranks, unless their node sets one."),
        "notify": (
            TEXT,
            "Command or https:// address to call at the end, a failure, a restart, a stall or a NaN; or $NAME,"
            " a variable that holds it.",
        ),
        "progress": (
            {"type": ["string", "boolean"]},
            "For a program: a regular expression with groups step, steps, loss, ... that finds its steps; or off.",
        ),
        "hang_after": (
            TIME,
            "Treat the run as hung after this long without a step (or output, for your own program).",
        ),
    }


def _setup() -> Schema:
    texts: Schema = {"type": ["string", "array"], "items": {"type": "string"}}
    parts = {
        "source": texts | {"description": "Files to source. A relative path is in the pushed code."},
        "modules": texts | {"description": "Environment modules to load."},
        "venv": TEXT | {"description": "Folder of a virtual environment. Its Python runs the ranks."},
        "run": texts | {"description": "Shell commands."},
    }
    whole: Schema = {"type": "object", "additionalProperties": False, "properties": parts}
    return {"anyOf": [texts, whole]}


def _restart() -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "max": {"type": "integer", "minimum": 0, "description": "Restart at most this often."},
            "backoff": TIME | {"description": "Wait this long before a restart."},
            "spare_nodes": TEXT | {"description": "Node set that replaces lost nodes."},
            "min_nodes": {
                "type": "integer",
                "minimum": 1,
                "description": "Continue with fewer nodes, but at least this many.",
            },
            "node_lost_after": TIME
            | {"description": "Treat a node as lost after this long without an answer."},
            "grow": {
                "enum": list(GROW_CHOICES),
                "description": "When nodes that are back are used again: at the next restart or checkpoint.",
            },
        },
    }


def _network() -> Schema:
    text = "auto: NCCL and HCCL decide. on: NCCL fails where it finds no RDMA. off: NCCL uses TCP."
    rows = {
        row.key: {"type": "integer", "minimum": row.least, "maximum": row.most}
        | {"description": f"{row.text} Sets {row.nccl} or {row.hccl}."}
        for row in TUNING
    }
    properties = {"rdma": {"enum": list(RDMA_CHOICES), "description": text}, **rows}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _slurm() -> Schema:
    count: Schema = {"type": "integer", "minimum": 1}
    lines: Schema = {"type": "array", "items": TEXT}
    keys: dict[str, tuple[Schema, str]] = {
        "nodes": (count, "How many nodes."),
        "partition": (TEXT, "Partition. Default: the cluster's."),
        "account": (TEXT, "Account that is charged."),
        "qos": (TEXT, "Quality of service."),
        "gres": (TEXT, "Devices of each node in Slurm's words: npu:8, gpu:4."),
        "constraint": (TEXT, "Features that the nodes must have."),
        "reservation": (TEXT, "Reservation to use."),
        "exclude": (TEXT, "Nodes to leave out: node[3-4]."),
        "cpus": (count, "Processor cores of each node."),
        "time": (
            {"type": ["string", "integer"]},
            "Time limit: minutes, hours:minutes:seconds or days-hours.",
        ),
        "requeue": (
            {"type": "boolean"},
            "Save and wait for nodes again before the time limit or on preemption.",
        ),
        "signal": (
            {"type": "integer", "minimum": 0},
            "Seconds before the time limit at which the run saves.",
        ),
        "extra": (lines, "More options of sbatch: --mem=0, --exclusive."),
        "setup": (lines, "Shell lines before the run starts: module load cann."),
    }
    properties = {key: {**schema, "description": text} for key, (schema, text) in keys.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _described(keys: dict[str, tuple[Schema, str]]) -> Schema:
    properties = {key: {**schema, "description": text} for key, (schema, text) in keys.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


COUNT: Schema = {"type": "integer", "minimum": 1}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {"type": ["string", "integer"]}


def container() -> Schema:
    """Return the schema of the `container` part of a job."""
    words: Schema = {"type": "array", "items": TEXT}
    return _described(
        {
            "image": (TEXT, "The image; for apptainer also a .sif file of the node."),
            "runtime": ({"enum": list(RUNTIMES)}, "The program that runs it. Default: docker."),
            "mounts": (words, "Folders of the node to mount: HOST:CONTAINER or HOST:CONTAINER:ro."),
            "options": (words, "More options of the runtime: --ulimit=memlock=-1."),
            "python": (TEXT, "The Python inside the image. Default: python3."),
        }
    )


def _kubernetes() -> Schema:
    return _described(
        {
            "nodes": (COUNT, "Number of pods, each on another node. Default: 1."),
            "devices": (COUNT, "Devices of each pod, and so ranks. Default: 1."),
            "kind": ({"enum": list(KINDS)}, "Kind of the devices. Default: cpu."),
            "chip": ({"enum": list(CHIPS)}, "Ascend hardware, for the labels of nodes. Default: a2."),
            "namespace": (TEXT, "Namespace of the objects. Default: default."),
            "image": (TEXT, "Image of the pods. Default: the image of `container`."),
            "cpus": (QUANTITY, "Processors of each pod."),
            "memory": (QUANTITY, "Memory of each pod: 256Gi."),
            "shared_memory": (QUANTITY, "Size of /dev/shm. Default: 16Gi."),
            "grace": (COUNT, "Seconds between SIGTERM and SIGKILL. Default: 30 more than the job's grace."),
            "retries": ({"type": "integer", "minimum": 0}, "How often all pods are restarted."),
            "queue": (TEXT, "Queue of Volcano. Default: default."),
            "code": (
                {"enum": list(CODE_CHOICES)},
                "configmap: in a ConfigMap, below 1 MiB. image: in the image.",
            ),
            "runtime": (TEXT, "ClusterTrainingRuntime of a TrainJob. Default: torch-distributed."),
            "service_account": (TEXT, "ServiceAccount of the pods."),
            "secret": (TEXT, "Secret with a key for each variable of `forward`."),
            "pull_secret": (TEXT, "Secret for the registry of the image."),
            "claims": (TEXTS, "PersistentVolumeClaims and where they are mounted: {data: /data}."),
            "node_selector": (TEXTS, "Labels that the nodes must have."),
        }
    )


def _modelarts() -> Schema:
    return _described(
        {
            "nodes": (COUNT, "How many nodes. Default: 1."),
            "devices": (COUNT, "Devices of a node of this flavor. Default: 8."),
            "flavor": (TEXT, "Flavor of the nodes."),
            "pool": (TEXT, "Id of a dedicated resource pool."),
            "image": (TEXT, "Path of the image in SWR. Default: the image of `container`."),
            "code": (TEXT, "OBS folder with the code and the job file."),
            "inputs": (TEXTS, "OBS folders with data, by the folder in the container."),
            "outputs": (TEXTS, "OBS folders for results, by the folder in the container."),
            "log": (TEXT, "OBS folder for logs."),
        }
    )


def _storage() -> Schema:
    endpoint = "URL of the store. Default: $AWS_ENDPOINT_URL, for obs:// $OBS_ENDPOINT."
    credentials = (
        "File with access keys in the form of ~/.aws/credentials, which only you may be able to read."
    )
    properties = {
        "endpoint": TEXT | {"description": endpoint},
        "region": TEXT | {"description": "Region of the store."},
        "credentials": TEXT | {"description": credentials},
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}
