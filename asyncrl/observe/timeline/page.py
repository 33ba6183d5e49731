"""The page: a Bokeh figure and the script that fills it. It needs no other server."""

from __future__ import annotations

from bokeh.core.properties import value
from bokeh.embed import components
from bokeh.models import (
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    LinearAxis,
    Range1d,
    TapTool,
    TimedeltaTicker,
    TimedeltaTickFormatter,
    WheelZoomTool,
)
from bokeh.plotting import figure
from bokeh.resources import INLINE
from jinja2 import Environment, PackageLoader

from asyncrl.observe.timeline.layout import STATES
from asyncrl.observe.timeline.view import COLUMNS, MAX_BARS, MAX_CELLS

TEMPLATES = Environment(loader=PackageLoader("asyncrl.observe.timeline", "page"), autoescape=True, trim_blocks=True)
"""They escape everything that comes from the run."""
_FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
_FAINT, _INK = "#e4e7eb", "#344054"
_TOOLTIP = """
<div style="max-width: 340px; font: 12px/1.5 system-ui, sans-serif; color: #1d2939">
  <div style="display: flex; gap: 12px; justify-content: space-between"><b>@title</b><span>@at</span></div>
  <div style="color: #475467; margin-top: 3px">@description{safe}</div>
</div>
"""


def page(run: str) -> str:
    """Return the self-contained HTML page of a run."""
    script, plot = components(_figure())
    return TEMPLATES.get_template("page.html").render(
        run=run,
        states=[state for state in STATES if state.name != "other"],
        bokeh=INLINE.render(),
        script=script,
        plot=plot,
    )


def _figure() -> figure:
    x_range = Range1d(0, 1000, name="time", min_interval=0.005)
    y_range = Range1d(10, 0, name="rows", min_interval=0.2)
    plot = figure(
        name="timeline",
        x_range=x_range,
        y_range=y_range,
        x_axis_location="above",
        tools="",
        toolbar_location=None,
        sizing_mode="stretch_both",
        output_backend="canvas",
        lod_threshold=MAX_BARS + len(STATES) * MAX_CELLS,
        outline_line_color=None,
        min_border_right=16,
        min_border_bottom=8,
    )
    stripes = ColumnDataSource({"y0": [], "y1": []}, name="stripes")
    plot.hstrip(y0="y0", y1="y1", source=stripes, fill_color="#f6f8fa", line_color=None, level="underlay")
    bars = ColumnDataSource({column: [] for column in COLUMNS}, name="bars")
    style = {"fill_color": "colour", "line_color": "edge", "line_width": 1, "fill_alpha": 0.92, "line_alpha": 0.92}
    drawn = plot.quad(
        left="left", right="right", top="top", bottom="bottom", source=bars, **style,
        selection_line_color="#111827", selection_line_width=1, selection_line_alpha=1.0,
        nonselection_fill_alpha=0.92, nonselection_line_alpha=0.92,
        hover_line_color="#111827", hover_fill_color="colour", hover_fill_alpha=1.0,
    )  # fmt: skip
    versions = ColumnDataSource({"x": [], "label": [], "y": []}, name="versions")
    plot.vspan(x="x", source=versions, line_color="#7c3aed", line_width=1, line_alpha=0.55, line_dash="dashed")
    plot.text(
        x="x", y="y", text="label", source=versions, text_color="#6d28d9", text_font=value(_FONT),
        text_font_size="11px", text_font_style="bold", text_baseline="bottom", x_offset=3, y_offset=0,
        background_fill_color="white", background_fill_alpha=0.85,
    )  # fmt: skip
    plot.xaxis.ticker = TimedeltaTicker()
    plot.xaxis.formatter = TimedeltaTickFormatter(
        seconds="%H:%M:%S", milliseconds="%H:%M:%S.%MS", microseconds="%H:%M:%S.%MS%US", days="%d days", context=None
    )
    groups = plot.yaxis[0]
    groups.update(name="groups", ticker=FixedTicker(ticks=[]), major_label_text_color="#667085")
    blocks = LinearAxis(name="blocks", ticker=FixedTicker(ticks=[]), major_label_text_font_style="bold")
    blocks.major_label_text_color = _INK
    plot.add_layout(blocks, "left")
    for axis in (plot.xaxis[0], groups, blocks):
        axis.update(
            axis_line_color=None, major_tick_line_color=None, minor_tick_line_color=None, major_label_text_font=_FONT
        )
        axis.major_label_text_font_size = "11px"
    plot.xgrid.grid_line_color, plot.ygrid.grid_line_color = _FAINT, None
    wheel = WheelZoomTool(name="wheel", dimensions="width")
    plot.add_tools(
        wheel, HoverTool(renderers=[drawn], tooltips=_TOOLTIP, point_policy="follow_mouse", line_policy="none")
    )
    plot.add_tools(TapTool(renderers=[drawn]))
    plot.add_tools("pan")
    plot.toolbar.active_scroll = wheel
    return plot
