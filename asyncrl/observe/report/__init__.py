"""`asyncrl report`: shows where a run spent its time, and what cost the most.

    events/ ─▶ load ─▶ a frame for each event ─▶ analysis ─▶ report.json ─▶ plots ─▶ PNGs ─▶ page ─▶ index.html

`analysis` combines the figures of `requests`, `samples`, `steps` and `versions` with the ranked `findings`. Plots and
page show only numbers of report.json.
"""
