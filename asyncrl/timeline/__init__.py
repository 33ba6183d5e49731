"""Where the events of a run are in time: lanes, levels of detail, the page that shows them, and the export as a trace.

events/step_…/*.jsonl ─▶ reading ─┬─▶ trace ─▶ trace.json.gz, for Perfetto and Chrome
                                  └─▶ index (numpy columns) ─▶ view ─▶ server ─▶ page
"""
