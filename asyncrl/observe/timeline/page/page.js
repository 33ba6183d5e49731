"use strict";
// Fills the figure of page.py: fetches the bars of the window in view, and fetches them again when the window moves and
// when there are new events.
(() => {
  const POLL_MS = 1000, SETTLE_MS = 90, MARGIN = 0.02, LABEL_PX = 12, NUMBERS_PX = 18;
  const $ = (id) => document.getElementById(id);
  const hidden = new Set();
  let model = null, follow = false, numEvents = -1, newest = 0, oldest = 0, begun = 0, height = 0, isFirst = true, chosen = -1, choosing = false;
  let numRefreshes = 0, timer = null, moving = false;
  let moved = false, rowsMoved = false;  // by the user; until then everything is shown
  let groups = [];
  let withStartUp = false;  // show the time before the first sample, too

  const named = (name) => Bokeh.documents[0].get_model_by_name(name);

  async function get(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
    return answer.json();
  }

  function start() {
    const plot = window.Bokeh?.documents[0]?.get_model_by_name("timeline");
    if (!plot || !Bokeh.index.find_one(plot)?.canvas_view) {
      requestAnimationFrame(start);
      return;
    }
    model = {
      x: named("timeline").x_range, y: named("timeline").y_range, bars: named("bars"), stripes: named("stripes"),
      versions: named("versions"), groups: named("groups"), blocks: named("blocks"), plot: named("timeline"),
    };
    for (const range of [model.x, model.y]) range.change.connect(() => { if (!moving) { userMoved(range); } });
    model.bars.selected.change.connect(clicked);
    const view = Bokeh.index.find_one(plot), canvas = view.canvas_view.events_el;
    // Remove the frame that a click would draw around everything; a style sheet does not reach it.
    canvas.style.outline = "none";
    // Over the names of the tracks the wheel changes their height; set before the tool handles it.
    window.addEventListener("wheel", (event) => {
      const across = event.clientX - canvas.getBoundingClientRect().left;
      named("wheel").dimensions = across < view.frame.bbox.left ? "height" : "width";
    }, { capture: true, passive: true });
    window.addEventListener("resize", refreshSoon);
    buttons();
    poll();
  }

  function move(range, start, end) {
    moving = true;
    range.setv({ start, end });
    moving = false;
  }

  function userMoved(range) {
    if (range === model.x) {
      moved = true;
      if (follow && newest > model.x.end) setFollow(false);
    } else rowsMoved = true;
    refreshSoon();
  }

  function refreshSoon() {
    clearTimeout(timer);
    timer = setTimeout(refresh, SETTLE_MS);
  }

  function setFollow(on) {
    follow = on;
    $("follow").checked = on;
    if (on) toNewest();
  }

  // The window keeps its width; until the user has moved it, it shows everything from the first sample on.
  function toNewest() {
    if (!moved) { whole(); return; }
    const width = model.x.end - model.x.start;
    move(model.x, newest + width * MARGIN - width, newest + width * MARGIN);
    refreshSoon();
  }

  function whole() {
    const first = withStartUp ? oldest : begun, width = Math.max(newest - first, 1);
    move(model.x, first - width * MARGIN, newest + width * MARGIN);
    moved = false;
    refreshSoon();
  }

  function wholeRun() {
    withStartUp = true;
    allRows();
    whole();
  }

  // Leave room for the version numbers above.
  function allRows() {
    const pixels = Math.max(100, model.plot.inner_height || 600);
    move(model.y, height, -height * NUMBERS_PX / (pixels - NUMBERS_PX));
    rowsMoved = false;
  }

  // Show only the group of tracks that were too thin to be drawn one by one.
  function openGroup(at) {
    const row = groups.find((each) => each.top <= at && at <= each.bottom + 1e-6);
    if (!row) return;
    const high = row.bottom - row.top, pixels = Math.max(100, model.plot.inner_height || 600);
    move(model.y, row.bottom + high * MARGIN, row.top - high * (MARGIN + NUMBERS_PX / (pixels - NUMBERS_PX)));
    rowsMoved = true;
    refreshSoon();
  }

  function zoom(factor) {
    const middle = (model.x.start + model.x.end) / 2, half = (model.x.end - model.x.start) / 2 * factor;
    move(model.x, middle - half, middle + half);
    moved = true;
    refreshSoon();
  }

  async function poll() {
    try {
      const state = await get("api/status");
      showStatus(state);
      newest = state.newest_ms;
      oldest = state.oldest_ms;
      begun = state.admitted_ms ?? oldest;
      if (state.events !== numEvents) {
        numEvents = state.events;
        if (isFirst && state.events) {
          isFirst = false;
          follow = state.live;
          $("follow").checked = follow;
          whole();
        } else if (follow || !moved) toNewest();
        else refreshSoon();
      }
    } catch (error) {
      showLost(error);
    }
    setTimeout(poll, POLL_MS);
  }

  function showLost(error) {
    $("summary").textContent = `The server does not answer: is asyncrl timeline still running? (${error.message})`;
    $("summary").className = "bad";
  }

  function showStatus(state) {
    $("phase").textContent = state.live ? `live · ${state.phase}` : state.phase;
    $("phase").className = `chip ${state.live ? "live" : state.phase}`;
    $("step").textContent = state.step === null ? "" :
      `step ${state.step}${state.total_steps ? ` of ${state.total_steps}` : ""} · version ${state.version}`;
    $("trouble").textContent = $("trouble").title = state.trouble;
    $("reading").textContent = state.read < 1 ? `reading events: ${Math.floor(state.read * 100)} %` :
      state.left_out_before === null ? "" :
      `from step ${state.left_out_before}: for earlier ones, use asyncrl timeline --steps`;
  }

  async function refresh() {
    const number = ++numRefreshes, width = Math.max(100, model.plot.inner_width || 1000);
    const query = new URLSearchParams({
      start: model.x.start, end: model.x.end, pixels: Math.round(width),
      pixels_high: Math.round(Math.max(100, model.plot.inner_height || 600)),
    });
    if (rowsMoved) {
      query.set("top", model.y.end);
      query.set("bottom", model.y.start);
    }
    hidden.forEach((block) => query.append("hide", block));
    let view;
    try {
      view = await get(`api/view?${query}`);
    } catch (error) {
      showLost(error);
      return;
    }
    if (number !== numRefreshes) return;
    draw(view);
  }

  function draw(view) {
    height = view.height;
    groups = view.groups;
    if (!rowsMoved) allRows();
    choose([]);
    model.bars.data = view.bars;
    choose(chosen < 0 ? [] : view.bars.event.flatMap((event, n) => (event === chosen ? [n] : [])));
    model.stripes.data = {
      y0: view.blocks.filter((_, n) => n % 2 === 0).map((row) => row.top - 0.3),
      y1: view.blocks.filter((_, n) => n % 2 === 0).map((row) => row.bottom + 0.3),
    };
    $("rows").hidden = !rowsMoved;
    // Rows only partly in view have labels, too.
    const top = model.y.end, bottom = model.y.start, pixel = (bottom - top) / Math.max(100, model.plot.inner_height || 600);
    model.versions.data = { ...view.versions, y: view.versions.x.map(() => Math.max(0, top + NUMBERS_PX * pixel)) };
    const inView = (row) => row.bottom > top && row.top < bottom;
    labels(model.groups, view.groups.filter(inView), (row) => (Math.max(row.top, top) + Math.min(row.bottom, bottom)) / 2);
    labels(model.blocks, view.blocks.filter(inView), (row) => Math.max(row.top, top) + LABEL_PX / 2 * pixel);
    blockList(view.all_blocks);
    const shown = view.bars.left.length, merged = view.merged;
    $("summary").className = "";
    $("summary").textContent = `${view.events.toLocaleString("en")} events` +
      (view.damaged ? ` (${view.damaged} damaged lines left out)` : "") +
      ` · ${shown.toLocaleString("en")} bars in view` +
      (merged ? `, ${merged.toLocaleString("en")} of them merged from several` : "") +
      (view.crowded ? " · crowded groups show how many bars they have at a time (click: one by one)" : "") +
      (shown ? "" : " · nothing here: press “whole run”");
    document.body.dataset.bars = String(shown);
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
  }

  function choose(places) {
    choosing = true;
    model.bars.selected.indices = places;
    choosing = false;
  }

  // Omit labels that would overlap the one above.
  function labels(axis, rows, where) {
    const pixels = (model.plot.inner_height || 600) / Math.abs(model.y.end - model.y.start);
    const ticks = [], names = new Map();
    let free = -Infinity;
    for (const row of rows) {
      const at = where(row);
      if ((at - free) * pixels < LABEL_PX) continue;
      ticks.push(at);
      names.set(at, row.name);
      free = at;
    }
    axis.major_label_overrides = names;
    axis.ticker.ticks = ticks;
  }

  function blockList(blocks) {
    const key = blocks.join("\n");
    if ($("blocks").dataset.key === key) return;
    $("blocks").dataset.key = key;
    $("blocks").replaceChildren(...blocks.map((block) => {
      const label = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox";
      box.checked = !hidden.has(block);
      box.addEventListener("change", () => { hidden[box.checked ? "delete" : "add"](block); refreshSoon(); });
      label.append(box, ` ${block}`);
      return label;
    }));
  }

  function clicked() {
    const place = model.bars.selected.indices[0];
    if (place === undefined || choosing) return;
    const bar = Object.fromEntries(["event", "left", "right", "top", "bottom", "title"].map((name) => [name, model.bars.data[name][place]]));
    if (bar.event >= 0) { details(bar.event); return; }
    if (bar.title.includes(" at a time in ")) { openGroup(bar.bottom); return; }
    const margin = Math.max((bar.right - bar.left) * 0.1, 0.005);
    move(model.x, bar.left - margin, bar.right + margin);
    moved = true;
    refreshSoon();
  }

  async function details(event) {
    chosen = event;
    choose(model.bars.data.event.flatMap((each, n) => (each === event ? [n] : [])));
    $("panel").hidden = false;
    document.body.classList.add("opened");
    $("details").textContent = "loading…";
    try {
      const answer = await fetch(`details/${event}`, { cache: "no-store" });
      // The server has escaped everything that comes from the run.
      $("details").innerHTML = await answer.text();
      $("panel").scrollTop = 0;
      const row = $("details").querySelector("tr.this"), list = row?.closest(".events");
      if (list) list.scrollTop = row.offsetTop - list.clientHeight / 2;
    } catch (error) {
      $("details").textContent = `The server does not answer (${error.message}).`;
    }
  }

  function close() {
    $("panel").hidden = true;
    document.body.classList.remove("opened");
    chosen = -1;
    choose([]);
  }

  function buttons() {
    $("follow").addEventListener("change", () => setFollow($("follow").checked));
    $("zoom-in").addEventListener("click", () => zoom(0.5));
    $("zoom-out").addEventListener("click", () => zoom(2));
    $("whole").addEventListener("click", wholeRun);
    $("rows").addEventListener("click", () => { allRows(); refreshSoon(); });
    $("close").addEventListener("click", close);
    document.addEventListener("keydown", (event) => {
      if (event.target instanceof HTMLInputElement) return;
      if (event.key === "Escape") close();
      if (event.key === "+") zoom(0.5);
      if (event.key === "-") zoom(2);
      if (event.key === "0") wholeRun();
    });
    document.addEventListener("click", (event) => {
      if (!$("parts").contains(event.target)) $("parts").open = false;
    });
  }

  start();
})();
