"""The routes, and the rules that all of them share: API key, errors, request counts."""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from trainer.corpus.tokenizer import END_OF_DOCUMENT
from trainer.errors import InputError
from trainer.serve.address import host_of, is_loopback
from trainer.serve.chat import MOST_TEXT, chat
from trainer.serve.completions import completions
from trainer.serve.faults import ApiError, Fields
from trainer.serve.guard import Counts
from trainer.serve.megatron import api
from trainer.serve.page import page
from trainer.serve.service import Service

_LOG = logging.getLogger("clusterctl.serve")
Handler = Callable[[Service, web.Request], Awaitable[web.StreamResponse]]
OPEN = ("/", "/health")
"""Paths that need no key."""


def application(service: Service, counts: Counts) -> web.Application:
    """Return the application for one model."""
    app = web.Application(client_max_size=service.limits.body, middlewares=[_middleware(service)])
    routes: tuple[tuple[str, str, Handler], ...] = (
        ("GET", "/", _page),
        ("GET", "/health", _health),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{model:.+}", _model),
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        ("GET", "/tokenizer_info", _tokenizer_info),
        ("PUT", "/api", api),
    )
    for method, path, handler in routes:
        app.router.add_route(method, path, partial(handler, service))
        if method == "GET":
            app.router.add_route("HEAD", path, partial(handler, service))
    app.router.add_get("/metrics", partial(_metrics, service, counts))
    return app


def _middleware(service: Service) -> Callable[..., Awaitable[web.StreamResponse]]:
    async def answer(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = resource.canonical if resource else "other"
        try:
            _check_key(service, request)
            response = await handler(request)
        except (ApiError, web.HTTPException) as error:
            response = _error(request, path, error)
        except ConnectionError:
            # The client closed the connection.
            service.metrics.answers[path, 499] += 1
            raise
        except Exception:
            _LOG.exception("%s failed", path)
            response = _error(
                request, path, ApiError(500, "internal error; the server's log has the traceback")
            )
        finally:
            service.budget.release(request)
        service.metrics.answers[path, response.status] += 1
        return response

    marked: Callable[..., Awaitable[web.StreamResponse]] = web.middleware(answer)
    return marked


def _error(request: web.Request, path: str, error: ApiError | web.HTTPException) -> web.Response:
    """Return an error in the JSON shape of the API that was called."""
    if isinstance(error, web.HTTPException):
        message = {
            404: f"there is no {request.path[:100]}",
            405: f"{request.path[:100]} does not have {request.method}: use {_methods(error)}",
        }.get(error.status, error.reason)
        error = ApiError(error.status, message)
    body: dict[str, object] = {"message": error.message} if request.path == "/api" else error.as_json()
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = web.json_response(body, status=error.status, headers=headers)
    if error.status in (408, 413):
        # Close the connection, because the rest of the body was not read.
        response.force_close()
    return response


def _methods(error: web.HTTPException) -> str:
    """Return the methods that a path has."""
    known = error.allowed_methods if isinstance(error, web.HTTPMethodNotAllowed) else ()
    return " or ".join(sorted(set(known) - {"HEAD"}))


def _check_key(service: Service, request: web.Request) -> None:
    if not service.api_key:
        # A web page of another site, open in a browser on this machine, must not reach a server that has no key. Its
        # site's name may lead to this machine, so that a browser takes the server for a part of the site.
        host, origin = request.headers.get("Host", "localhost"), request.headers.get("Origin")
        if not is_loopback(host_of(host)):
            raise ApiError(403, f"Host is {host[:100]!r}, not localhost: start the server with an API key")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(403, "requests from pages of other sites are refused")
        return
    if request.path in OPEN:
        return
    given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    if not hmac.compare_digest(given.encode(), service.api_key.encode()):
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


async def _page(service: Service, _: web.Request) -> web.Response:
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
    )
    decoder = service.decoder
    text = page(
        service.name, decoder.window, nonce, glm=decoder.glm is not None, with_key=bool(service.api_key)
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return web.Response(text=text, content_type="text/html", headers=headers)


async def _health(service: Service, _: web.Request) -> web.Response:
    if service.draining:
        raise ApiError(503, "the server is stopping")
    return web.json_response({"status": "ok", "model": service.name})


def _model_entry(service: Service) -> dict[str, object]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "clusterctl",
        "max_model_len": service.decoder.window,
    }


async def _models(service: Service, _: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_model_entry(service)]})


async def _model(service: Service, request: web.Request) -> web.Response:
    name = request.match_info["model"]
    if name != service.name:
        raise ApiError(404, f"the model {name[:100]!r} does not exist", "model", "model_not_found")
    return web.json_response(_model_entry(service))


async def _tokenize(service: Service, request: web.Request) -> web.Response:
    body = await service.body(request)
    fields = Fields.read(body, ("model", "return_token_strs"))
    prompt = fields.text("prompt")
    if not fields.has("prompt"):
        fields.fault("prompt", "is missing")
    if len(prompt) > MOST_TEXT:
        fields.fault("prompt", f"has {len(prompt)} characters; at most {MOST_TEXT} are encoded at a time")
    first = service.decoder.prefix if fields.flag("add_special_tokens", True) else ()
    fields.done()
    ids = await service.encode(len(body), lambda: [*first, *service.decoder.tokenizer.encode(prompt)])
    return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": service.decoder.window})


async def _detokenize(service: Service, request: web.Request) -> web.Response:
    fields = Fields.read(await service.body(request), ("model",))
    ids = fields.raw("tokens")
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        fields.fault("tokens", "is not a list of token ids")
    fields.done()
    try:
        if ids:
            service.decoder.checked(ids, truncate=True)
    except InputError as error:
        raise ApiError(400, error.message, "tokens") from None
    return web.json_response({"prompt": service.decoder.tokenizer.decode(ids)})


async def _tokenizer_info(service: Service, _: web.Request) -> web.Response:
    tokenizer = service.decoder.tokenizer
    end = tokenizer.token_of(tokenizer.eos) or END_OF_DOCUMENT
    known = {name: service.tokens.get(name) for name in ("bos_token", "pad_token", "unk_token")}
    info = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        **{name: value for name, value in known.items() if value is not None},
        "model_max_length": service.decoder.window,
        "vocab_size": tokenizer.vocab,
    }
    if service.template:
        info["chat_template"] = service.template.source
    return web.json_response(info)


async def _metrics(service: Service, counts: Counts, _: web.Request) -> web.Response:
    text = service.metrics.text(service.decoder.batcher, counts, service.runner.busy)
    return web.Response(text=text, content_type="text/plain", charset="utf-8")
