"""`python -m trainer serve`: load a model, then answer requests until SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from clusterctl.wire.requests import ServeRequest, ServerOptions
from trainer.command_line import refuse
from trainer.env import install_command
from trainer.errors import InputError, Together
from trainer.generate.command import closing, load_decoder
from trainer.serve.address import is_loopback
from trainer.side_files import SideFiles

if TYPE_CHECKING:
    from trainer.chat_template import ChatTemplate
    from trainer.generate.decoder import Decoder
    from trainer.serve.service import Limits, Service

KEY_HINT = "write a key into a file: openssl rand -hex 16 > key.txt"


def run(request: ServeRequest) -> int:
    """Serve until a signal arrives; return exit code 0."""
    from trainer.device import prepare_threads

    try:
        import aiohttp
        import jinja2
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", install_command("serve")) from None
    del aiohttp, jinja2
    key, side, template = _read_inputs(request)
    prepare_threads()
    started = time.monotonic()
    decoder = load_decoder(
        request.checkpoint, request.model, request.server.batch, request.server.chat_template
    )
    with closing(decoder):
        service = _service(request, decoder, side, template, key)
        network = decoder.network
        sys.stdout.write(
            f"loaded {service.name} on {network.cache.device} with weights in {network.kind}, "
            f"in {time.monotonic() - started:.1f} s\n"
        )
        code = asyncio.run(_serve(service, request.server))
    return code


def _read_inputs(request: ServeRequest) -> tuple[str, SideFiles, ChatTemplate | None]:
    """Return the API key, the files next to the tokenizer and the chat template; raise one error with all faults.

    This is done before the model is loaded, which can take minutes.
    """
    together = Together()
    key, template = "", None
    side = SideFiles.beside(request.model.tokenizer or request.checkpoint)
    with together.collected():
        refuse(request)
    with together.collected():
        key = _key(request.server)
    with together.collected():
        template = side.template(request.server.chat_template)
    with together.collected():
        _require_address(request.server.host, request.server.port)
    together.check()
    return key, side, template


def _key(server: ServerOptions) -> str:
    """Return the API key; refuse an address other than loopback without a key."""
    if server.api_key_file is None:
        if not is_loopback(server.host):
            raise InputError(
                f"--host {server.host} is reachable from other machines, so an API key is needed",
                "give a file with one by --api-key-file, or use --host 127.0.0.1",
            )
        return ""
    try:
        key = str(server.api_key_file.read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = (
            f"not UTF-8 at byte {error.start}" if isinstance(error, UnicodeDecodeError) else error.strerror
        )
        raise InputError(f"--api-key-file {server.api_key_file}: {problem}", KEY_HINT) from None
    if len(key) < 8 or not key.isascii() or not key.isprintable():
        raise InputError(
            f"{server.api_key_file}: the key needs 8 or more printable ASCII characters", KEY_HINT
        )
    return key


def _require_address(host: str, port: int) -> None:
    """Raise InputError if this process cannot listen at the address now."""
    if not 0 <= port < 65536:
        # `refuse` reports it.
        return
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not a name of a machine"
        raise InputError(f"--host {host}: {reason}", "use an address of this machine") from None
    missing: OSError | None = None
    is_free = False
    for family, kind, protocol, _, address in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As asyncio's servers do: addresses of connections that were just closed are free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                is_free = True
        except OSError as error:
            # A name may have an address of a family that this machine lacks.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise InputError(f"{host}:{port}: {error.strerror}", "use another --port") from None
            missing = error
    if missing and not is_free:
        raise InputError(f"{host}:{port}: {missing.strerror}", "use another --host")


def _service(
    request: ServeRequest,
    decoder: Decoder,
    side: SideFiles,
    template: ChatTemplate | None,
    key: str,
) -> Service:
    """Return the service of a loaded model."""
    from trainer.serve.runner import Runner
    from trainer.serve.service import Service

    runner = Runner(decoder, request.server.queue)
    name = request.server.name or request.checkpoint.resolve().name
    return Service(name, decoder, runner, _limits(request.server), template, side.tokens, key)


def _limits(server: ServerOptions) -> Limits:
    from trainer.serve.service import Limits

    return Limits(
        body=server.max_body,
        request_seconds=server.request_timeout,
        queue=server.queue,
        connections=server.connections,
    )


async def _serve(service: Service, options: ServerOptions) -> int:
    """Answer requests until SIGTERM or SIGINT, then finish the running ones; return exit code 0."""
    from aiohttp import web

    from trainer.serve.app import application
    from trainer.serve.guard import Counts, guarded, protocol_of

    counts = Counts(service.limits.connections)
    runner = web.AppRunner(application(service, counts), handler_cancellation=True, access_log=None)
    await runner.setup()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    assert runner.server is not None
    make = guarded(protocol_of(runner.server), counts, service.limits.head_seconds)
    try:
        server = await loop.create_server(make, options.host, options.port, backlog=1024)
    except OSError as error:
        raise InputError(f"{options.host}:{options.port}: {error.strerror}", "use another --port") from None
    service.runner.start()
    port = server.sockets[0].getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    sys.stdout.write(f"serving {service.name} at http://{host}:{port} (process {os.getpid()})\n")
    sys.stdout.flush()
    await stop.wait()
    service.draining = True
    sys.stdout.write(f"stopping: {len(service.runner.active)} running requests are finished first\n")
    sys.stdout.flush()
    deadline = time.monotonic() + options.drain
    while service.runner.active and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    server.close()
    await runner.cleanup()
    service.runner.stop()
    return 0
