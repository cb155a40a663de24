"""The playground: one prompt to the base and to adapters, side by side.

A model's answer is the chat route's own, for the tenant that is charged for it. With scripts it
streams; without, the page comes back with all answers. Knows the form; refuses to know engines.
"""

from dataclasses import replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Form, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from loraplex.platform.admin.examples import curl_for, python_for
from loraplex.platform.admin.playground_facts import model_choices
from loraplex.platform.admin.route import PageRoute
from loraplex.platform.admin.said import said_by
from loraplex.platform.admin.shell import page, shell
from loraplex.platform.admin.visit import PATH, Visit, Writing
from loraplex.platform.admin.whose import chosen_tenant, tenant_choices
from loraplex.platform.api.chat import ChatRequest
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.failures import checked
from loraplex.platform.api.generate import create_chat_completion
from loraplex.platform.db.models import Tenant
from loraplex.platform.errors import ApiError, NotFound
from loraplex.platform.keys import Principal
from loraplex.platform.quotas import TenantLimits
from loraplex.web.contexts.playground import Answer, PlaygroundPage

router = APIRouter(prefix=f"{PATH}/playground", route_class=PageRoute, include_in_schema=False)
Short = Annotated[str, Query(max_length=160)]
MAX_MODELS = 6
PROMPT = "What is the capital of France?"


class Question(BaseModel):
    """What to ask one model."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(max_length=256)]
    prompt: Annotated[str, Field(min_length=1, max_length=20_000)]
    system: Annotated[str, Field(max_length=20_000)] = ""
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 60
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0

    def chat(self, *, stream: bool) -> ChatRequest:
        """As the chat route takes it."""
        turns = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*turns, {"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return checked(ChatRequest, body)


@router.get("")
async def show(
    request: Request,
    ctx: Ctx,
    visit: Writing,
    model: Annotated[list[str], Query()] = [],  # noqa: B006
    tenant_id: Short = "",
) -> Response:
    """The form."""
    question = Question(model="", prompt=PROMPT)
    return page(await _page(request, ctx, visit, tenant_id, model, question))


@router.post("/ask")
async def ask(
    request: Request, ctx: Ctx, visit: Writing, body: Question, tenant_id: Short = ""
) -> Response:
    """One model's answer as a stream of server-sent events."""
    tenant = await _tenant(ctx, visit, tenant_id)
    return await _asked(request, ctx, visit, tenant, body, stream=True)


@router.post("")
async def ask_all(
    request: Request,
    ctx: Ctx,
    visit: Writing,
    prompt: Annotated[str, Form(max_length=20_000)],
    model: Annotated[list[str], Form()] = [],  # noqa: B006
    more: Annotated[str, Form(max_length=500)] = "",
    system: Annotated[str, Form(max_length=20_000)] = "",
    max_tokens: Annotated[int, Form(ge=1, le=4096)] = 60,
    temperature: Annotated[float, Form(ge=0, le=2)] = 0.0,
    tenant_id: Short = "",
) -> Response:
    """Without scripts: the page again, with every model's answer, one after the other."""
    tenant = await _tenant(ctx, visit, tenant_id)
    question = Question(
        model="", prompt=prompt, system=system, max_tokens=max_tokens, temperature=temperature
    )
    others = [each.strip() for each in more.split(",") if each.strip()]
    answers = []
    for each in dict.fromkeys([*model, *others][:MAX_MODELS]):
        one = question.model_copy(update={"model": each})
        try:
            response = await _asked(request, ctx, visit, tenant, one, stream=False)
            answers.append(await _answer(request, each, response))
        except ApiError as error:
            answers.append(Answer(each, "", "", error.message))
    context = await _page(request, ctx, visit, tenant_id, model, question)
    return page(replace(context, answers=tuple(answers), more=more))


async def _asked(
    request: Request, ctx: Context, visit: Visit, tenant: Tenant, body: Question, *, stream: bool
) -> Response:
    principal = Principal(
        key_id=visit.principal.key_id,
        tenant_id=tenant.id,
        scopes=frozenset({"infer"}),
        limits=TenantLimits.of(tenant),
        is_user=True,
    )
    request_id = request.state.request_id
    return await create_chat_completion(principal, ctx, request_id, body.chat(stream=stream))


async def _answer(request: Request, model: str, response: Response) -> Answer:
    status, raw = await said_by(response, request)
    told = msgspec.json.decode(raw)
    if status != 200:
        return Answer(model, "", "", told["error"]["message"])
    usage = told["usage"]
    facts = f"{usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} generated"
    return Answer(model, told["choices"][0]["message"]["content"] or "", facts)


async def _tenant(ctx: Context, visit: Visit, tenant_id: str) -> Tenant:
    async with ctx.db.read(visit.tenant_id) as session:
        tenant = await chosen_tenant(session, visit, tenant_id)
    if tenant is None:
        raise NotFound("There is no tenant yet; create one first.")
    return tenant


async def _page(
    request: Request,
    ctx: Context,
    visit: Visit,
    tenant_id: str,
    models: list[str],
    question: Question,
) -> PlaygroundPage:
    async with ctx.db.read(None) as session:
        tenant = await chosen_tenant(session, visit, tenant_id)
        tenants = await tenant_choices(session, visit, tenant)
        whose = tenant.id if tenant else None
        choices = await model_choices(session, whose, ctx.base.name, models)
    mark = f"?tenant_id={whose}" if visit.tenant_id is None and whose else ""
    url = str(request.base_url).rstrip("/")
    first = next((each.value for each in choices if each.chosen), ctx.base.name)
    return PlaygroundPage(
        shell=shell(request, visit, "Playground"),
        models=choices,
        prompt=question.prompt,
        system=question.system,
        max_tokens=question.max_tokens,
        temperature=question.temperature,
        act=f"{PATH}/playground{mark}",
        ask=f"{PATH}/playground/ask{mark}",
        answers=(),
        curl=curl_for(url, first, question.prompt),
        python=python_for(url, first, question.prompt),
        tenants=tenants,
        tenant=tenant.name if tenant else None,
    )
