"""SQL over records: DuckDB with the views runs, requests, slots and results, and nothing else within reach."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.errors import OptionError, UnsupportedFeatureError
from pocketllm.evidence.query.frames import Frames

VIEWS = ("runs", "requests", "slots", "results")


@dataclass(frozen=True)
class Answer:
    """Column names and rows of plain Python values."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def as_dicts(self) -> list[dict[str, Any]]:
        """Rows as JSON has them; OptionError where two columns have one name."""
        twice = [name for name, count in Counter(self.columns).items() if count > 1]
        if twice:
            raise OptionError(
                f"two columns are called {twice[0]!r}, and JSON has room for one: name them apart with `as`"
            )
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def ask(frames: Frames, query: str) -> Answer:
    """Run one query. OptionError with DuckDB's own sentence for a bad one; the query can neither read nor write files.

    UnsupportedFeatureError where DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError as error:
        raise UnsupportedFeatureError(
            "`records sql` needs DuckDB", ["install it with `pip install 'pocketllm[sql]'` (or `pip install duckdb`)"]
        ) from error
    with duckdb.connect(":memory:") as connection:
        for view in VIEWS:
            # only what the query names is built: the requests of many runs take a while to read
            if view in query.lower():
                connection.register(view, getattr(frames, view))
        connection.execute("set enable_external_access = false; set lock_configuration = true")
        try:
            count = num_queries(connection.extract_statements(query))
            if count > 1:
                raise OptionError(
                    f"{count} queries were given, and the answer is to one: ask each by itself, or name what one needs "
                    "of another by `with`"
                )
            found = connection.execute(query)
            if found is None:
                raise OptionError(f"the query is empty; views: {', '.join(VIEWS)}")
            columns = tuple(column[0] for column in found.description or ())
            return Answer(columns, tuple(found.fetchall()))
        except duckdb.Error as error:
            raise OptionError(f"the query cannot be answered: {sentence(error)}; views: {', '.join(VIEWS)}") from error


def num_queries(statements: Sequence[Any]) -> int:
    """How many queries DuckDB's statements are.

    Before 2.0 a `pivot` is a CREATE for each column that it spreads, without a text, and then its SELECT, whose text
    may not even be asked for (IndexError).
    """
    return sum(statement.type.name != "CREATE" or statement.query != "" for statement in statements)


def sentence(error: Exception) -> str:
    """The first line of an error, without its final stop."""
    return str(error).strip().splitlines()[0].rstrip(".")
