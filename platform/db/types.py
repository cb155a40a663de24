"""Column types that mean the same on SQLite and on PostgreSQL."""

from datetime import UTC, datetime

from sqlalchemy import DateTime, Dialect, String, TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """A moment, always timezone-aware and in UTC; a naive datetime is refused.

    SQLite keeps no offset, so what is stored there is UTC and is read back as UTC.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To UTC; raises `ValueError` for a naive datetime."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a datetime without a timezone cannot be stored")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """As an aware datetime in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Text(TypeDecorator[str]):
    """Text of at most so many characters, by which rows may be looked up with whatever was sent.

    PostgreSQL takes no NUL, not even in a comparison. A NUL is bound as U+FFFD: it finds nothing,
    on either database, because no name or id that is stored has one.
    """

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Without NUL."""
        return value and value.replace("\0", "\ufffd")


def utc_now() -> datetime:
    """The current moment, in UTC."""
    return datetime.now(UTC)
