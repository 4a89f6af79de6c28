"""The application of a gateway: the models that it serves, and the way of every request through it.

Owns which generation takes the new requests for each model, and how one is prepared, activated, retired and discarded;
and of a request the choice of its route, its sender and its model, and how an operation of a dialect is run. A request
stays with the generation that it began with; where several models are served, it counts for all of them until its
model is known. Knows no dialect by name, and no connection.
"""

import asyncio
import gc
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import NoReturn

import orjson

from vecd.base.files import JsonMapping, JsonObject, load
from vecd.base.tasks import NoTasks
from vecd.gateway.api.body import INLINE_BYTES, Bodies
from vecd.gateway.api.fields import REQUEST_ID, value_of
from vecd.gateway.api.large_json import Bounds
from vecd.gateway.api.operation import (
    ParsedDecode,
    ParsedEmbed,
    ParsedMessages,
    ParsedStay,
    ParsedTokenize,
    Work,
    add_others,
    wrong_model,
)
from vecd.gateway.api.served import HEADER as MODEL_HEADER
from vecd.gateway.api.served import PREFIX, ModelInfo, Models, header_value, readings_of
from vecd.gateway.app.conditions import CONDITION, check_after, check_before, parse_demand
from vecd.gateway.app.cors import Cors
from vecd.gateway.app.routes import (
    Claim,
    Route,
    Table,
    dialects_of,
    find_route,
    methods_at,
    name_in,
    paths_of,
    render_error,
    served,
)
from vecd.gateway.config import ApiKey, GatewayConfig
from vecd.gateway.dialects.ask import INPUT, INPUT_TYPE, MODEL, PROMPT_NAME, read
from vecd.gateway.encoding.result import Pieces
from vecd.gateway.errors import ApiError, NotFound, Unavailable
from vecd.gateway.request import HEADER, Durations, Embedded, HttpRequest, ModelChoice, Response, Source
from vecd.gateway.request import REQUEST_ID as VALID_ID
from vecd.gateway.scheduling.keys import ANY_SCOPE, Principal, Principals
from vecd.gateway.service import GatewayProcess, Service, read_tokenizer
from vecd.gateway.telemetry.prometheus import Processes
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelError
from vecd.shm import control
from vecd.shm.settings import names_of
from vecd.shm.shared_metrics import Gauge
from vecd.shm.views import map_arena

log = logging.getLogger("vecd.gateway")

_RETIRE_POLL_S = 0.02
_LARGE_BODY_BYTES = 64 * 1024
_UNKNOWN_KEY = 401
"""The status of responses that tell no model's name."""
_MODELS_TIMEOUT_S = 10.0
"""How long a request waits for models that are still to come. A gateway that is started again has read the tokenizers
of all models within a second or two."""
_TIMING_HEADER = "x-vecd-timing"
"""A request with this header, whatever its value, gets a response with `server-timing`."""
_INLINE_ITEMS = 4096
"""Responses up to this many items are rendered on the event loop: 1 ms, 4 ms with a report of each."""
_INLINE_FLOATS = 32 * 1024
"""So are rows of tokens with this many floats in all: 1.4 ms."""
_TEXTS = frozenset((Source.TEXT,))


class App:
    """The `vecd.gateway.http.connection.Application` that the server serves."""

    def __init__(
        self,
        routes: Table,
        config: GatewayConfig,
        process: GatewayProcess,
        *,
        read_tokenizer: Callable[[GatewayConfig], Tokenizer] = read_tokenizer,
        make_service: Callable[[GatewayConfig, int, Tokenizer, GatewayProcess], Service] = Service,
    ) -> None:
        """`config`: of the first model, which is active at once. `read_tokenizer` is called in a thread for each other
        generation. Raises ModelError."""
        self.routes = routes
        self.process = process
        self.principals = Principals(config.keys, config.gateways)
        self.processes = Processes()
        self.bodies = Bodies()
        self.documents: dict[Hashable, bytes] = {}
        """What `/openapi.json` keeps until models or keys change."""
        self.begin_trace: Callable[[HttpRequest], None] | None = None
        self.on_activated: Callable[[GatewayConfig], None] = lambda config: None
        """Gets a new configuration of the first model."""
        self.preparing: dict[int, asyncio.Task[None]] = {}
        self.have_come = asyncio.Event()
        """All models have been activated."""
        self._paths, self._dialects = paths_of(routes), dialects_of(routes)
        self._read_tokenizer = read_tokenizer
        self._make_service = make_service
        self._num_awaited = process.start.num_models - 1
        generation = process.start.generation
        self.active = first = make_service(config, generation, read_tokenizer(config), process)
        """That of the first model. Its configuration is the server's."""
        self.of_models: tuple[Service, ...] = (first,)
        """The active generation of each model, in the order of the configuration."""
        self.all = {generation: first}
        """Those that have requests, or may get them."""
        self._configure()

    # --- what the server calls ------------------------------------------------------------------------------

    def check_head(self, http: HttpRequest) -> Response | None:
        """Refuse what can be refused before the body has arrived. Raises ApiError."""
        path = http.path
        if self.models.is_complete or not path.startswith(PREFIX) or self.models.split(path) is not None:
            self._check_head(self._enter(http), http)
        else:  # its model may be still to come, and the body arrives meanwhile
            http.path = self._likeliest_reading(path)[1]
            self._check_head(self.active, http)
            http.path = path
        return None

    async def handle(self, http: HttpRequest) -> Response:
        if not self.models.is_complete:
            await self._await_models(http)
        if self.begin_trace is not None:
            self.begin_trace(http)
        service = self._enter(http)
        route, principal = self._find(service, http)
        http.timeline.principal = principal.name
        held = [*self.of_models] if http.may_choose else [service]
        for each in held:
            each.num_handled += 1
        try:
            if route.handler is not None:
                return await route.handler(self, service, http, principal)
            if route.claims[0].operation.describe is not None:
                return self._describe(route, service, http, principal)
            return await self._operate(route, service, http, principal, held)
        finally:
            for each in held:
                each.num_handled -= 1

    def render_error(self, error: ApiError, http: HttpRequest | None) -> Response:
        return render_error(error, http, self.tables[False, False], self._dialects)

    def add_headers(self, response: Response, http: HttpRequest | None) -> None:
        if http is not None:
            timeline, identity = http.timeline, http.identity
            if timeline.model and response.status != _UNKNOWN_KEY:
                response.headers[MODEL_HEADER] = header_value(timeline.model)
            if identity is not None and identity.text is not None:
                response.headers[HEADER] = identity.text
        if self._cors is not None:
            self._cors.add_headers(response, http)
        if http is not None and _TIMING_HEADER in http.headers and http.timeline.is_embedded:
            response.headers["server-timing"] = _server_timing(http.timeline.durations(time.monotonic()))

    # --- the route and the sender ---------------------------------------------------------------------------

    def _check_head(self, service: Service, http: HttpRequest) -> None:
        """Raises ApiError."""
        route, principal = self._find(service, http)
        length = http.headers.get("content-length", "")
        if route.scope == "embed" and not (length.isdecimal() and int(length) <= _LARGE_BODY_BYTES):
            principal.check_quota()  # a small body is read all the same, so that the client keeps its connection

    def _find(self, service: Service, http: HttpRequest) -> tuple[Route, Principal]:
        """Raises ApiError. Called twice for a request that arrives in parts, because its key may have been removed
        before the last one."""
        if self._cors is not None and self._cors.is_preflight(http):
            route = Route(self._cors.respond_to_preflight, scope=None)
        else:
            choice = http.choice
            table = self.tables[http.is_admin, choice is not None and choice.is_by_path]
            methods = table.get(http.path)
            route = (methods and methods.get(http.method)) or find_route(table, http.method, http.path)
            http.timeline.endpoint = route.endpoint
        principal = self.principals.identify(http.headers, http.client, route.scope, is_admin=http.is_admin)
        reached = principal.models
        if reached is not None and route.scope in ("embed", ANY_SCOPE) and service.config.model not in reached:
            # None that the key reaches is served: a configuration and its keys take effect one after the other.
            if not self.models.is_complete:
                raise self.models.refusal("")
            raise NotFound("No model that this API key may use is served", code="model_not_found")
        return route, principal

    # --- the model, where several are served ----------------------------------------------------------------

    async def _await_models(self, http: HttpRequest) -> None:
        """Let a request that may be for a model which is still to come wait for it. During the server's own start no
        request waits."""
        path = self._likeliest_reading(http.path)[1] if http.path.startswith(PREFIX) else http.path
        route = (methods_at(self.tables[False, False], path) or {}).get(http.method)
        if route is not None and route.scope == "embed" and self.active.dispatcher.start_stage is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.have_come.wait(), _MODELS_TIMEOUT_S)

    def _enter(self, http: HttpRequest) -> Service:
        """The service of the model that a request's path or header names, or else the first one, of those that its API
        key reaches. Raises ApiError for an unknown name in the path. Side effects: where several are served, the
        request has a `choice`, and the prefix that names a model is taken from the path."""
        choice = http.choice
        if choice is None and not self.models.are_several:
            return self.active
        models = self.models_for(self.principals.identify(http.headers, http.client, None, is_admin=http.is_admin))
        # A key that reaches some models alone learns nothing of others.
        first = self.all[models.all[0].generation] if models.all else self.active
        if choice is None:
            named, is_by_path = http.headers.get(MODEL_HEADER, ""), http.path.startswith(PREFIX)
            if is_by_path:
                named, http.path = models.split(http.path) or self._refuse(models, first, http)
            choice = http.choice = ModelChoice(named, is_by_path=is_by_path)
        # Found again when the rest of a body has arrived: another generation may be the active one then.
        found = models.find(choice.named) if choice.named else None
        if found is None:
            if choice.found is not None:  # the model was withdrawn meanwhile
                raise models.refusal(choice.named)
            return first
        choice.found, http.timeline.model = found, found.model
        return self.all[found.generation]

    def _refuse(self, models: Models, first: Service, http: HttpRequest) -> NoReturn:
        """Raises ApiError. Side effect: the request's path is the rest, in whose shape the error is rendered."""
        name, http.path = self._likeliest_reading(http.path)
        self._check_head(first, http)
        raise models.refusal(name)

    def _likeliest_reading(self, path: str) -> tuple[str, str]:
        """A name, and the rest of a path that begins with PREFIX, which has a route if possible."""
        readings, table = readings_of(path), self.tables[False, False]
        return next((each for each in readings if methods_at(table, each[1]) is not None), readings[0])

    def models_for(self, principal: Principal) -> Models:
        """Of all models those that a sender reaches."""
        return self.models if principal.models is None else self.models.only(principal.models)

    def _choose(
        self, route: Route, info: ModelInfo, models: Models, choice: ModelChoice, body: JsonMapping
    ) -> tuple[ModelInfo, JsonMapping]:
        """The model that answers a request, and the body with the model's own name. `info`: the model which the path or
        the header names, or the first. Raises what `Models.choose` raises."""
        claims = route.claims_for(body)
        operations = [claim.operation for claim in claims]
        words = [word for operation in operations for word in operation.fields.words.get(MODEL.key, ())]
        field = next((word for word in words if body.get(word)), MODEL.name)
        given = body.get(field) if words else None
        name = given if isinstance(given, str) else None
        if choice.found is None:
            asked = [(each.asks_for(body) if each.asks_for is not None else ()) or each.needs for each in operations]
            needs = [need for each in asked for need in each] if all(asked) else []
            keys = (INPUT_TYPE.key, PROMPT_NAME.key)
            of_purposes = (word for each in operations for key in keys for word in each.fields.words.get(key, ()))
            said = ((word, value_of(word, body)) for word in of_purposes)
            word, purpose = next((each for each in said if isinstance(each[1], str)), ("task", ""))
            try:
                info = models.choose(choice.named or name, needs, purpose=purpose, word=word)
            except ApiError as error:
                error.dialect = claims[0].dialect.name
                raise
        if choice.named:
            own = models.own_name(info, choice.named)
            if own not in info.names:  # it chooses a prompt, too, which the body then does not
                return info, {**body, field: own}
        return info, body if name is None else {**body, field: models.own_name(info, name)}

    # --- the operations of dialects -------------------------------------------------------------------------

    def _describe(self, route: Route, service: Service, http: HttpRequest, principal: Principal) -> Response:
        operation, info, path = route.claims[0].operation, service.info, http.path
        models = self.models if http.choice is None else self.models_for(principal)
        assert operation.describe is not None
        if not http.may_choose:
            http.identity = info.identity  # errors have it, too
        if "*" in route.path and (name := name_in(route.path, path)) is not None:
            if not http.may_choose:
                info.prompt_of_model_name(name)
                models = Models((info,), refuses_unknown=False)
            info = models.choose(name, (), refuses_unknown=True)
            path = route.path.replace("*", models.own_name(info, name))
        elif http.may_choose and operation.describes_all:
            return operation.describe(models.all, path)
        http.identity = info.identity
        return operation.describe([info], path)

    async def _operate(
        self, route: Route, service: Service, http: HttpRequest, principal: Principal, held: list[Service]
    ) -> Response:
        """Run the operation that a body belongs to. Side effect: once the body has named its model, the services of
        the others are not `held` any more."""
        choice, timeline, info, models = http.choice, http.timeline, service.info, self.models
        timeline.arrived_at = time.monotonic()
        if choice is not None:
            info, models = choice.found or info, self.models_for(principal)
        if choice is None or choice.found is not None:
            http.identity = info.identity
        try:
            principal.check_quota()  # before the body is parsed
            demand = parse_demand(http.headers[CONDITION]) if CONDITION in http.headers else None
            if choice is None and len(route.claims) == 1 and not info.can(route.claims[0].operation.needs):
                raise wrong_model(route.claims[0].operation, info, self._paths)
            body = _small_object(http)
            if body is not None:
                info, claim, work, field = self._read(route, info, models, http, body)
            else:
                take = partial(self._read, route, info, models, http)
                threads, tenant = service.tokenizer.threads, principal.tenant
                reading = self.bodies.parse(http.body, route.names, take, threads, tenant, http.coding)
                info, claim, work, field = await reading
        except ApiError as error:
            if error.dialect is None and error.param is not None:  # the field may be of one of the dialects alone
                error.dialect = route.claim_of({error.param: True}, info).dialect.name
            raise
        timeline.parsed_at = time.monotonic()
        http.body, body = b"", None  # frees up to tens of megabytes
        if choice is not None:
            service = self.all[info.generation]
            for each in [each for each in held if each.config.model != info.model]:
                held.remove(each)
                each.num_handled -= 1
        try:
            if demand is not None:
                await check_before(demand, service, info.identity, service.deadline_of(http))
            left = work if isinstance(work, ParsedEmbed) else await _reduced(work, service, http, principal)
            if isinstance(left, ParsedEmbed):
                request, tokenizer = left.request, service.tokenizer
                is_large = left.is_large or len(request.inputs) > _INLINE_ITEMS
                if is_large:
                    estimate = partial(tokenizer.estimate_tokens, request.inputs, request.tokenizing)
                    num_estimated = await tokenizer.threads.call(estimate, principal.tenant)
                else:
                    num_estimated = tokenizer.estimate_tokens(request.inputs, request.tokenizing)
                embedded = await service.pipeline.run(request, num_estimated, timeline, principal)
                embedded.model, embedded.request_id = info.model, http.request_id
                if request.output.is_per_token:
                    is_large |= embedded.num_tokens * request.output.width_of(info.card) > _INLINE_FLOATS
                if is_large:
                    rendering = render_steps(left, claim, info, embedded)
                    response = await tokenizer.threads.run(rendering, principal.tenant)
                else:
                    response = render(left, claim, info, embedded)
            else:
                response = left
            if isinstance(work, ParsedStay) and work.sets_keep_alive:
                # Only now: a model that is to stay for 0 s would be unloaded before.
                service.residence.keep_alive(work.keep_alive_s)
            if demand is not None:
                check_after(demand, service, info.identity)
            return response
        except ApiError as error:
            error.dialect = claim.dialect.name
            error.field = field
            add_others(error, claim.operation, info, models.all, self._paths)
            raise

    def _read(
        self, route: Route, info: ModelInfo, models: Models, http: HttpRequest, body: JsonMapping
    ) -> tuple[ModelInfo, Claim, Work, str]:
        """What a body asks for, of which model, and the client's word for the inputs. Called in a thread if the body is
        large."""
        choice = http.choice
        if "*" in route.path:  # Azure's clients send both, and it is the path that names the deployment
            body = {**body, MODEL.name: name_in(route.path, http.path)}
        if choice is not None:
            info, body = self._choose(route, info, models, choice, body)
            http.timeline.model, http.identity = info.model, info.identity
        claim = route.claims[0] if len(route.claims) == 1 else route.claim_of(body, info)
        http.timeline.endpoint = claim.endpoint
        operation = claim.operation
        if REQUEST_ID.name in operation.fields.small and "x-request-id" not in http.headers:
            own_id = body.get(REQUEST_ID.name)
            if isinstance(own_id, str) and VALID_ID.fullmatch(own_id):
                http.request_id = own_id  # an error in another field has that name, too
        try:
            is_checked = choice is None and len(route.claims) == 1  # before the body was parsed
            if not is_checked and not info.can(operation.needs):
                raise wrong_model(operation, info, self._paths)
            assert operation.parse is not None
            call = read(operation.fields, body, http.headers, info)
            work = operation.parse(call)
            if isinstance(work, ParsedEmbed) and work.field:
                return info, claim, work, work.field
            words = operation.fields.words.get(INPUT.key)
            is_first = words is not None and body.get(words[0]) is not None  # as in most bodies
            return info, claim, work, words[0] if words and is_first else call.wanted.word(INPUT)
        except ApiError as error:
            error.dialect = claim.dialect.name
            add_others(error, operation, info, models.all, self._paths)
            raise

    # --- the models -----------------------------------------------------------------------------------------

    def schedule_dispatch(self) -> None:
        for service in self.all.values():
            service.dispatcher.schedule_dispatch()

    def stop(self) -> None:
        for service in self.all.values():
            service.stop()

    def _configure(self) -> None:
        """Serve the active generations, by the configuration of the first model, which is the server's."""
        config = self.active.config
        origins = names_of(config.cors_origins)
        self._cors = Cors(origins) if origins else None
        self._lay_out()
        self.models = Models(
            [service.info for service in self.of_models],
            refuses_unknown=config.unknown_model == "refuse",
            is_complete=not self._num_awaited,
        )
        self.bodies.max_bytes = config.max_body_bytes
        self.bodies.bounds = Bounds(  # of all models: a large body is read before its model is known
            max(service.config.max_inputs for service in self.of_models),
            max(service.tokenizer.max_chars for service in self.of_models),
            max(service.tokenizer.max_ids for service in self.of_models),
        )
        for service in self.of_models:
            service.watch_use(is_one_of_several=self.models.are_several)

    def _lay_out(self) -> None:
        """Find out what is served, by whether the admin listener serves it, and by whether the path names a model."""
        self.documents.clear()
        has_admin_listener, have_keys = self.active.config.has_admin_listener, self.principals.have_keys
        place = partial(served, self.routes, has_admin_listener=has_admin_listener, has_keys=have_keys)
        self.tables = {each: place(is_admin=each[0], is_by_path=each[1]) for each in product((False, True), repeat=2)}

    def give_up(self) -> None:
        """The drain's deadline is near."""
        message = "The server is shutting down and did not get to this request"
        for service in self.all.values():
            service.pipeline.end(lambda: Unavailable(message, retry_after_s=1))

    # --- messages of the supervisor -------------------------------------------------------------------------

    def on_message(self, message: control.Message, fds: Sequence[int]) -> None:
        """Obey a message, without waiting. The descriptors stay the caller's."""
        match message:
            case control.WorkerUp():
                service = self.all[message.generation]
                slots = map_arena(fds[0], service.config.arena, writable=False)[self.process.shared_metrics.gateway]
                service.dispatcher.worker_up(message.incarnation, slots, message.facts)
                if (number_format := message.facts.get("dtype")) is not None:
                    service.info.identity.add_format(number_format)
            case control.ModelIdentity():
                identity = self.all[message.generation].info.identity
                identity.set(message.digest, message.by_alias, message.problem)
            case control.ModelFiles():
                self.all[message.generation].known.changed_files = message.changed
            case control.WorkerDown():
                for service in self.all.values():
                    service.dispatcher.worker_down(
                        message.incarnation,
                        message.reason,
                        has_crashed=message.has_crashed,
                        is_planned=message.is_planned,
                    )
            case control.ModelIs():
                self.all[message.generation].change_state(message)
            case control.ModelBroken():
                service = self.all[message.generation]
                service.dispatcher.set_broken(message.reason)
                service.pipeline.fail_all(service.dispatcher.broken_error)
            case control.Quarantined() | control.InputDeaths() | control.InputsCleared():
                for service in self.all.values():
                    if service.config.model == message.model:  # its generations have one key for digests
                        service.known.note(message)
            case control.Progress():
                if self.active.dispatcher.start_stage is not None:
                    self.active.dispatcher.start_stage = message.stage
            case control.NewKeys():
                # What has been admitted goes on, and what has been used stays used.
                self.principals.set_keys(tuple(load(ApiKey, key) for key in message.keys))
                self._lay_out()
            case control.Prepare():
                self.prepare(message, socket.socket(fileno=os.dup(fds[0])))
            case control.Activate():
                self.activate(message.generation)
            case control.Withdrawn():
                self._replace([self.all[message.generation]])
            case control.Discard():
                self.discard(message.generation)

    def prepare(self, message: control.Prepare, zmq_listening: socket.socket) -> None:
        """Make ready for another generation, and report it. Takes the ownership of `zmq_listening`."""
        # A socket object closes itself if the task is cancelled before it begins.
        task = self.preparing[message.generation] = asyncio.ensure_future(self._prepare(message, zmq_listening))
        task.add_done_callback(lambda _: self.preparing.pop(message.generation))

    async def _prepare(self, message: control.Prepare, zmq_listening: socket.socket) -> None:
        generation, send = message.generation, self.process.send
        tokenizer: Tokenizer | None = None
        try:
            config = load(GatewayConfig, message.config)
            tokenizer = await asyncio.get_running_loop().run_in_executor(None, self._read_tokenizer, config)
            if config.otlp_endpoint:
                with suppress(ImportError):  # `make_sender` logs it
                    await asyncio.to_thread(importlib.import_module, "vecd.gateway.telemetry.spans")
            service = self._make_service(config, generation, tokenizer, self.process)
            service.dispatcher.start(zmq_listening.fileno())
        except asyncio.CancelledError:
            raise
        except (ModelError, NoTasks) as error:
            send(control.Prepared(generation, str(error)))
        except BaseException as error:  # libraries in Rust raise other classes than Exception
            log.error("generation %d cannot be prepared", generation, exc_info=True)
            send(control.Prepared(generation, f"a gateway failed with {type(error).__name__}"))
        else:
            zmq_listening.detach()  # the dispatcher owns it from now on
            self.all[generation] = service
            send(control.Prepared(generation))
        finally:
            if tokenizer is not None and generation not in self.all:
                tokenizer.threads.close()

    def activate(self, generation: int) -> None:
        """Give new requests for its model to a generation, and retire the one before."""
        service, config = self.all[generation], self.all[generation].config
        before = [
            each
            for each in self.of_models
            if each.config.model_index == config.model_index or each.config.model == config.model
        ]
        if not before and self._num_awaited:
            self._num_awaited -= 1
        service.dispatcher.activate()
        self._replace(before, service)

    def _replace(self, before: Sequence[Service], *new: Service) -> None:
        """Give new requests to the new ones, and none to those before, which are retired."""
        first = self.active
        services = [*(each for each in self.of_models if each not in before), *new]
        self.of_models = tuple(sorted(services, key=lambda service: service.config.model_index))
        self.active = self.of_models[0]
        self._configure()
        if not self._num_awaited:
            self.have_come.set()
        if self.active is not first:
            self.on_activated(self.active.config)
        for service in before:
            service.dispatcher.retire()
            if service.residence.is_awaited:  # what waits for its model to be loaded ends: it will not be
                message = "The model is being reloaded"
                service.pipeline.end(partial(Unavailable, message, retry_after_s=1, code="reloading"))
            self._retire(service)

    def _retire(self, service: Service) -> None:
        """Report as soon as its last request is answered."""
        if service.is_in_use:
            asyncio.get_running_loop().call_later(_RETIRE_POLL_S, self._retire, service)
        else:
            self.process.send(control.Retired(service.generation))

    def discard(self, generation: int) -> None:
        """Forget a generation, whether it is being prepared or has been retired."""
        if (preparing := self.preparing.get(generation)) is not None:
            preparing.cancel()
        service = self.all.pop(generation, None)
        if service is not None:
            service.pipeline.end(lambda: Unavailable("The server has changed its configuration", retry_after_s=1))
            service.stop()
            # Waits for the step that is being taken, which on a huge text may be a second.
            asyncio.get_running_loop().run_in_executor(None, service.tokenizer.threads.close)
            gc.collect()  # a tokenizer, and views of arenas

    # --- what is measured -----------------------------------------------------------------------------------

    def gauges(self) -> dict[Gauge, int]:
        return self._gauges_of([*self.all.values()])

    def gauges_of_models(self) -> dict[str, dict[Gauge, int]]:
        """By the model's name; none where there is one model."""
        generations: dict[str, list[Service]] = {}
        for service in self.all.values() if self.models.are_several else ():
            generations.setdefault(service.config.model, []).append(service)
        return {model: self._gauges_of(services) for model, services in generations.items()}

    def _gauges_of(self, services: Sequence[Service]) -> dict[Gauge, int]:
        now, gauges = time.monotonic(), [service.gauges() for service in services]
        num_workers = [each.dispatcher.num_usable_workers for each in services if each in self.of_models]
        return {
            **{gauge: sum(each[gauge] for each in gauges) for gauge in gauges[0]},
            Gauge.QUEUE_AGE_US: int(max(service.policy.oldest_wait_s(now) for service in services) * 1e6),
            Gauge.WORKERS: sum(num_workers),
        }

    def num_waiting(self) -> int:
        """Sequences. What waits without a worker is not counted: cores granted for it would be idle."""
        return sum(service.policy.queued_sequences for service in self.all.values() if service.dispatcher.is_sending)


# --- one request ------------------------------------------------------------------------------------------------


async def _reduced(work: Work, service: Service, http: HttpRequest, principal: Principal) -> ParsedEmbed | Response:
    """What is left of `work` once all that is not an embedding has been done."""
    inspection = service.pipeline.inspection
    match work:
        case ParsedMessages():
            further = work.proceed(await inspection.render(work, service.deadline_of(http), principal))
            return await _reduced(further, service, http, principal)
        case ParsedTokenize():
            await inspection.describe(work, service.deadline_of(http), principal)
            return work.render()
        case ParsedDecode():
            return work.render(await inspection.decode(work, service.deadline_of(http), principal))
        case ParsedStay():
            if work.work is not None or not (work.loads and service.residence.is_awaited):
                return work.work or work.render(0)
            started_at = time.monotonic()
            await service.residence.until_ready(service.deadline_of(http) - started_at)
            return work.render(round((time.monotonic() - started_at) * 1e9))
    return work


def _small_object(http: HttpRequest) -> JsonObject | None:
    """What most bodies are; None for one that is large or compressed, or no object."""
    if http.coding is not None or len(http.body) > INLINE_BYTES:
        return None
    try:
        fields = orjson.loads(http.body)
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) else None


def render(work: ParsedEmbed, claim: Claim, info: ModelInfo, embedded: Embedded, *, is_whole: bool = True) -> Response:
    """`is_whole`: False leaves a body in pieces that are still to be written."""
    response, own_headers = work.render(embedded), claim.dialect.headers
    headers = response.headers
    if own_headers is not None:
        headers.update(own_headers(embedded, info))
    if embedded.num_truncated:
        headers["x-vecd-truncated"] = str(embedded.num_truncated)
    if embedded.num_chunked:
        headers["x-vecd-chunked"] = str(embedded.num_chunked)
    if embedded.sources != _TEXTS and (vocabularies := sorted(each.value for each in embedded.sources - _TEXTS)):
        headers["x-vecd-token-ids"] = ", ".join(vocabularies)
    if is_whole and not isinstance(response.body, bytes | list):
        response.body = list(response.body)
    return response


def render_steps(
    work: ParsedEmbed, claim: Claim, info: ModelInfo, embedded: Embedded
) -> Generator[None, None, Response]:
    response, pieces = render(work, claim, info, embedded, is_whole=False), Pieces()
    if not isinstance(response.body, bytes | list):
        for piece in response.body:
            pieces.append(piece)
            yield
        response.body = pieces
    return response


def _server_timing(durations: Durations) -> str:
    """Source of the format, which browsers show: https://www.w3.org/TR/server-timing/."""
    stages = zip(durations._fields, durations, strict=True)
    return ", ".join(f"{name.removesuffix('_s')};dur={seconds * 1e3:.3f}" for name, seconds in stages)
