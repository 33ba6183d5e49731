"""The events of a run over time: tracks, levels of detail, the page that shows them, and the export as a trace.

events/step_…/*.jsonl ─▶ reader ─▶ layout ─┬─▶ trace ─▶ trace.json.gz, for Perfetto and Chrome
                                           └─▶ index (numpy columns) ─▶ view ─▶ server ─▶ page
"""
