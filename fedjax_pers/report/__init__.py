"""What a run leaves behind: its folder of results, tables and figures."""

from fedjax_pers.report.plots import accuracy_against_traffic, accuracy_ecdf, learning_curves, method_styles
from fedjax_pers.report.results import (
    append_rows,
    append_timings,
    prepare,
    read_clients,
    read_config,
    read_rows,
    read_summary,
    sync,
    truncate_after,
    write_clients,
    write_environment,
    write_summary,
)
from fedjax_pers.report.tables import comparison_table, to_markdown

__all__ = [
    "accuracy_against_traffic",
    "accuracy_ecdf",
    "append_rows",
    "append_timings",
    "comparison_table",
    "learning_curves",
    "method_styles",
    "prepare",
    "read_clients",
    "read_config",
    "read_rows",
    "read_summary",
    "sync",
    "to_markdown",
    "truncate_after",
    "write_clients",
    "write_environment",
    "write_summary",
]
