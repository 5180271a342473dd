"""Where the time goes: a profile of any call as a table, a timeline, a list of costs or a memory curve."""

from lib.profiling.capture import op_table, profiled, region, save_trace, spans_of, traffic_table
from lib.profiling.timeline import Span, plot_timeline, show_timeline
from lib.profiling.trace import events_of, short_name

__all__ = [
    "Span", "events_of", "op_table", "plot_timeline", "profiled", "region", "save_trace", "short_name",
    "show_timeline", "spans_of", "traffic_table",
]  # fmt: skip
