"""What `asyncrl report` tells of a run: where its time went, figure by figure, and what lost most of it.

    events/ ─▶ load ─▶ frames, one an event ─▶ analysis (pure) ─▶ report.json ─┬─▶ plots ─▶ PNGs ─┬─▶ page ─▶ index.html
                                                                               └──────────────────┘

Every number of every figure is in report.json: the plots and the page are drawn from it alone.
"""
