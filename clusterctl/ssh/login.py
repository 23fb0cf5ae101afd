"""Log in with key files, certificates and the ssh agent; each key is offered once."""

from __future__ import annotations

import contextlib
import copy
import getpass
import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from paramiko.auth_handler import AuthOnlyHandler
from paramiko.common import cMSG_SERVICE_REQUEST
from paramiko.ssh_exception import AuthenticationException, SSHException

from clusterctl.errors import LoginRefused
from clusterctl.ssh.config import Route
from clusterctl.ssh.session import Session

AskSecret = Callable[[str], "str | None"]
"""Returns a secret that the user types; None if there is no user to ask."""


class Keys:
    """The user's keys: each file is read once, and each passphrase is requested once, for all nodes."""

    def __init__(self, ask: AskSecret | None = None) -> None:
        self._ask = ask
        self._read: dict[str, paramiko.PKey | str] = {}
        self._agent: list[paramiko.PKey] | None = None
        self._change = threading.Lock()
        self._asking = threading.Lock()
        self.served = ""
        """The path of the key file that a server accepted last."""

    def usable_keys(self, route: Route) -> Iterator[tuple[str, paramiko.PKey]]:
        """Yield names and usable keys: key files (the last accepted one first), then keys of the ssh agent."""
        found = [(path, key) for path in route.identities for key in self._forms(path)]
        yield from sorted(found, key=lambda named_key: named_key[0] != self.served)
        locked = {_public_blob(path) for path in route.identities if self._of_file(path) == LOCKED}
        for key in self._of_agent() if route.use_agent or locked else []:
            if route.use_agent or key.asbytes() in locked:
                yield f"the ssh agent's {key.get_name()} key", key

    def _forms(self, path: str) -> list[paramiko.PKey]:
        """Return a key with its certificate, then without: the certificate may have expired."""
        key = self._of_file(path)
        if not isinstance(key, paramiko.PKey):
            return []
        if key.public_blob is None:
            return [key]
        bare = copy.copy(key)
        bare.public_blob = None
        return [key, bare]

    def locked_files(self, route: Route) -> list[str]:
        """Return the key files without a known passphrase."""
        return [path for path in route.identities if self._of_file(path) == LOCKED]

    def unlocked(self, path: str) -> paramiko.PKey | None:
        """Return a locked key after the user has typed its passphrase; other threads wait for the same key."""
        with self._asking:
            known = self._of_file(path)
            if isinstance(known, paramiko.PKey):
                return known
            for _ in range(3):
                secret = self._ask(f"Passphrase for {path}: ") if self._ask and known == LOCKED else None
                if secret is None:
                    break
                key = _load(path, secret)
                if isinstance(key, paramiko.PKey):
                    self._read[path] = key
                    return key
            self._read[path] = GIVEN_UP
        return None

    def why_not(self, path: str) -> str:
        """Return why a key file cannot be used; "" if it can."""
        found = self._of_file(path)
        return found if isinstance(found, str) else ""

    def _of_file(self, path: str) -> paramiko.PKey | str:
        with self._change:
            if path not in self._read:
                self._read[path] = _load(path, None)
            return self._read[path]

    def _of_agent(self) -> list[paramiko.PKey]:
        with self._change:
            if self._agent is None:
                self._agent = []
                with contextlib.suppress(SSHException, OSError):
                    turn = threading.Lock()
                    self._agent = [_one_at_a_time(key, turn) for key in paramiko.Agent().get_keys()]
            return self._agent


LOCKED = "it is locked by a passphrase"
GIVEN_UP = "it is locked by a passphrase, and the right one was not given"


def _load(path: str, passphrase: str | None) -> paramiko.PKey | str:
    """Return a key with the certificate next to it, or why it cannot be used."""
    secret = passphrase.encode() if passphrase else None
    try:
        data = Path(path).read_bytes()
        key = _of_private(_decoded(data, secret))
        if os.path.isfile(f"{path}-cert.pub"):
            key.load_certificate(f"{path}-cert.pub")
        return key
    except TypeError:
        # The cryptography package raises TypeError for a missing passphrase.
        return LOCKED
    except OSError as problem:
        return f"it can't be read: {problem.strerror}"
    except (ValueError, SSHException, UnsupportedAlgorithm) as problem:
        return LOCKED if passphrase else f"this key cannot be used: {problem}"


def _decoded(data: bytes, secret: bytes | None) -> Any:
    """Return the private key in OpenSSH, PEM or PKCS8 format."""
    if b"BEGIN OPENSSH PRIVATE KEY" in data:
        return serialization.load_ssh_private_key(data, secret)
    return serialization.load_pem_private_key(data, secret)


def _of_private(private: Any) -> paramiko.PKey:
    """Return the key as paramiko's type: paramiko cannot read PKCS8."""
    kinds: list[tuple[Any, Any]] = [
        (ed25519.Ed25519PrivateKey, paramiko.Ed25519Key),
        (ec.EllipticCurvePrivateKey, paramiko.ECDSAKey),
        (rsa.RSAPrivateKey, paramiko.RSAKey),
    ]
    for kind, of_paramiko in kinds:
        if isinstance(private, kind):
            encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
            text = private.private_bytes(encoding, form, serialization.NoEncryption()).decode()
            key: paramiko.PKey = of_paramiko.from_private_key(io.StringIO(text))
            return key
    raise ValueError(f"paramiko can't use its kind, {type(private).__name__}")


def _public_blob(path: str) -> bytes:
    """Return the public key stored next to a locked key."""
    try:
        return paramiko.pkey.PublicBlob.from_file(f"{path}.pub").key_blob
    except (OSError, ValueError):
        return b""


def _one_at_a_time(key: Any, turn: threading.Lock) -> paramiko.PKey:
    """Return an ssh agent's key that many threads may use; the agent's socket takes one request at a time."""
    sign = key.sign_ssh_data

    def in_turn(data: bytes, algorithm: str | None = None) -> Any:
        with turn:
            return sign(data, algorithm)

    key.sign_ssh_data = in_turn
    return key  # type: ignore[no-any-return]


class _Handler(AuthOnlyHandler):
    """paramiko's login handler, but the waiting thread reads the socket."""

    limit = 20.0

    def wait_for_response(self, event: threading.Event) -> list[str]:
        session: Session = self.transport  # type: ignore[assignment]
        with contextlib.suppress(SSHException, EOFError, OSError):
            if not session.until(event.is_set, time.monotonic() + self.limit):
                raise AuthenticationException("no answer to the login in time")
        return super().wait_for_response(event)

    def _parse_userauth_info_request(self, m: Any) -> None:
        raise AuthenticationException("it requires more than a key")


def log_in(session: Session, node: str, route: Route, keys: Keys, limit: float) -> None:
    """Offer each key once over one connection; raise LoginRefused if the server accepts none."""
    handler = session.auth_handler = _Handler(session)
    handler.limit = limit
    user = route.user or getpass.getuser()
    ask = paramiko.Message()
    ask.add_byte(cMSG_SERVICE_REQUEST)
    ask.add_string("ssh-userauth")
    session._send_message(ask)
    tried: list[str] = []
    for name, key in _offers(route, keys):
        tried.append(name)
        try:
            left = handler.auth_publickey(user, key)
        except AuthenticationException as refusal:
            if not session.active:
                raise _refused(node, route, user, tried, keys, str(session.problem or refusal)) from None
            continue
        if session.is_authenticated():
            session.packets.let_go()
            keys.served = name
            return
        raise LoginRefused(
            node,
            f"a key alone is not enough for {user}@{route.host}: the server also requires {', '.join(left)}",
        )
    raise _refused(node, route, user, tried, keys, "")


def _offers(route: Route, keys: Keys) -> Iterator[tuple[str, paramiko.PKey]]:
    yield from keys.usable_keys(route)
    for path in keys.locked_files(route):
        key = keys.unlocked(path)
        if key is not None:
            yield path, key


def _refused(node: str, route: Route, user: str, tried: list[str], keys: Keys, detail: str) -> LoginRefused:
    who = f"{user}@{route.host}"
    unusable = [f"{path}: {why}" for path in route.identities if (why := keys.why_not(path))]
    problem = f"no key was accepted for {who} (tried {', '.join(tried) or 'none'})"
    if unusable:
        problem += "; not tried: " + "; ".join(unusable)
    if detail:
        problem += f": {detail}"
    hint = f"try `ssh -p {route.port} {who}`; name `user` and `key` in the inventory"
    if any("passphrase" in reason for reason in unusable):
        hint = "add the key to an ssh agent with `ssh-add`, or name another key in the inventory (`key`)"
    return LoginRefused(node, problem, hint)
