"""A tenant's limits as a form: what each means, what is set, and how much of it is used.

Knows names and numbers; refuses to know where they are counted.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from loraplex.platform.api.quota_schemas import QuotaOut
from loraplex.platform.db.models import Tenant
from loraplex.platform.quotas import TenantLimits
from loraplex.web.contexts.tenants import LimitField
from loraplex.web.words import of_bytes, of_count

FIELDS: Final[Mapping[str, tuple[str, str]]] = {
    "requests_per_minute": ("Requests a minute", "Counted over any 60 seconds."),
    "tokens_per_minute": ("Tokens a minute", "Prompt and completion together."),
    "max_concurrency": ("Requests at once", ""),
    "tokens_per_day": ("Tokens a day", "A UTC day."),
    "tokens_per_month": ("Tokens a month", "A UTC month."),
    "storage_bytes": ("Stored bytes", "Such as 5 GiB. Of its adapters' images; each counts once."),
    "max_adapters": ("Adapters", ""),
    "resident_bytes": (
        "Bytes in memory",
        "Such as 5 GiB. Its adapters' images in the engine.",
    ),
    "weight": ("Weight", "Where tenants share the engine, 2 gets twice what 1 gets."),
    "max_running": ("Sequences at once", "In the engine's batch; the others wait."),
    "kv_share": ("Share of the KV cache", "From 0 to 1; 1 is all of it."),
}
FRACTIONS: Final = frozenset({"weight", "kv_share"})
REQUIRED: Final = FRACTIONS
BYTES: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)b?", re.IGNORECASE)


def numbers_of(
    given: Mapping[str, str],
) -> tuple[dict[str, int | float | None], dict[str, str]]:
    """The form's numbers, empty ones as no limit; and what is wrong, by field."""
    numbers: dict[str, int | float | None] = {}
    wrong: dict[str, str] = {}
    for name in FIELDS:
        text = given.get(name, "").replace(",", "").replace(" ", "")
        try:
            if text:
                numbers[name] = _number(name, text)
            elif name in REQUIRED:
                wrong[name] = "A number is needed, such as 1."
            else:
                numbers[name] = None
        except ValueError:
            such = ", such as 5 GiB" if name.endswith("_bytes") else ""
            wrong[name] = f"A number is needed{such}, or nothing for no limit."
    return numbers, wrong


def _number(name: str, text: str) -> int | float:
    """What was meant; raises `ValueError`."""
    if name in FRACTIONS:
        return float(text)
    if name.endswith("_bytes") and (told := BYTES.fullmatch(text)):
        number, unit, binary = told.groups()
        power = " kmgt".index(unit.lower() or " ")
        return int(Decimal(number) * (1024 if binary else 1000) ** power)
    return int(text)


def limit_fields(
    tenant: Tenant,
    quota: QuotaOut | None,
    given: Mapping[str, str],
    wrong: Mapping[str, str],
) -> tuple[LimitField, ...]:
    """The form's fields: what was given where it was wrong, else what is set."""
    limits, used = TenantLimits.of(tenant), _used(quota)
    return tuple(
        _field(name, label, hint, getattr(limits, name), used.get(name), given, wrong)
        for name, (label, hint) in FIELDS.items()
    )


def _field(
    name: str,
    label: str,
    hint: str,
    limit: float | None,
    used: int | None,
    given: Mapping[str, str],
    wrong: Mapping[str, str],
) -> LimitField:
    told = None
    if used is not None and limit is not None:
        show = of_bytes if name.endswith("_bytes") else of_count
        told = f"{show(used)} of {show(int(limit))} used"
    return LimitField(
        name=name,
        label=label,
        hint=hint,
        value=given.get(name, "" if limit is None else f"{limit:.15g}"),
        used=told,
        share=min(1.0, used / limit) if told and used is not None and limit else None,
        error=wrong.get(name),
    )


def _used(quota: QuotaOut | None) -> dict[str, int]:
    if quota is None:
        return {}
    found = {"storage_bytes": quota.storage_bytes.used, "max_adapters": quota.adapters.used}
    for bucket in quota.buckets:
        if bucket.kind == "tenant":
            found |= {each.name: each.used for each in bucket.limits}
    return found
