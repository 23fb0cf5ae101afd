"""A stand-in of the few paths of the Kubernetes API that `submit k8s` uses: it keeps objects and plays their pods."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "stand-in-token"
OBJECTS = re.compile(
    r"/(?P<group>api/v1|apis/[^/]+/[^/]+)/namespaces/(?P<namespace>[^/]+)/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?P<log>/log)?\Z"
)


@dataclass
class Stage:
    """What the API shows at one look: pod states, the log of the first pod, and the status of the job."""

    pods: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
    status: dict[str, Any] = field(default_factory=dict)


@dataclass
class Cluster:
    """The objects of the stand-in, the requests that it got, and the stages that a job goes through."""

    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    refuse: str = ""
    """A kind in plural that may not be created."""

    def stage(self) -> Stage:
        return self.stages[0] if self.stages else Stage()


def pod(name: str, phase: str, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a pod as the API shows it."""
    status: dict[str, Any] = {"phase": phase}
    if state:
        status["containerStatuses"] = [
            {"name": "node", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}
        ]
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "node"}]}, "status": status}


def node(name: str, **allocatable: str) -> dict[str, Any]:
    """Return a node as the API shows it."""
    resources = {key.replace("__", "/").replace("_", "."): value for key, value in allocatable.items()}
    return {"metadata": {"name": name, "labels": {}}, "spec": {}, "status": {"allocatable": resources}}


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, value: Any, status: int = 200) -> None:
            body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(value, str) else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def refuse(self, status: int, message: str) -> None:
            self.answer({"kind": "Status", "message": message, "code": status}, status)

        def handle_one(self, method: str) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            cluster.requests.append(f"{method} {parts.path}")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.refuse(401, "Unauthorized")
            if parts.path == "/api/v1/nodes":
                return self.answer(
                    {"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": cluster.nodes}
                )
            found = OBJECTS.match(parts.path)
            if not found:
                return self.refuse(404, f"no path {parts.path}")
            getattr(self, f"on_{method.lower()}")(
                found["plural"], found["name"], bool(found["log"]), body, parts
            )

        def on_post(self, plural: str, name: str, log: bool, body: Any, parts: Any) -> None:
            key = plural, body["metadata"]["name"]
            if plural == cluster.refuse:
                return self.refuse(403, f"{plural} is forbidden")
            if key in cluster.objects:
                return self.refuse(409, f'{plural} "{key[1]}" already exists')
            cluster.objects[key] = body
            self.answer(body, 201)

        def on_get(self, plural: str, name: str, log: bool, body: Any, parts: Any) -> None:
            if log:
                return self.answer(cluster.stage().log)
            if plural == "pods":
                self.answer(
                    {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": cluster.stage().pods}
                )
                # The next look shows the next stage.
                if len(cluster.stages) > 1:
                    cluster.stages.pop(0)
                return
            if name:
                if (plural, name) not in cluster.objects:
                    return self.refuse(404, f'{plural} "{name}" not found')
                return self.answer({**cluster.objects[plural, name], "status": cluster.stage().status})
            wanted = parse_qs(parts.query).get("labelSelector", [""])[0].partition("=")
            items = [
                value
                for (kind, _), value in cluster.objects.items()
                if kind == plural and value["metadata"]["labels"].get(wanted[0]) == wanted[2]
            ]
            self.answer({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})

        def on_delete(self, plural: str, name: str, log: bool, body: Any, parts: Any) -> None:
            deleted = cluster.objects.pop((plural, name), None)
            if deleted is None:
                return self.refuse(404, f'{plural} "{name}" not found')
            # The API answers so for services, and with a status for the rest.
            self.answer(deleted if plural == "services" else {"kind": "Status", "status": "Success"})

        def do_GET(self) -> None:
            self.handle_one("GET")

        def do_POST(self) -> None:
            self.handle_one("POST")

        def do_DELETE(self) -> None:
            self.handle_one("DELETE")

    return Handler


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Cluster, Path]]:
    """Run the stand-in; yield its objects and a kubeconfig that leads to it."""
    cluster = Cluster()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cluster))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    config = folder / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1", "kind": "Config", "current-context": "stand-in",
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "users": [{"name": "u", "user": {"token": TOKEN}}],
                "contexts": [{"name": "stand-in", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )  # fmt: skip
    try:
        yield cluster, config
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
