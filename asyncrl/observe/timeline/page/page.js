"use strict";
// Fills the figure of page.py: asks the server for the bars of the window in view, again when the window moves and when
// there are new events.
(() => {
  const POLL_MS = 1000, SETTLE_MS = 90, MARGIN = 0.02, LABEL_PX = 12, NUMBERS_PX = 18;
  const $ = (id) => document.getElementById(id);
  const hidden = new Set();
  let model = null, follow = false, known = -1, newest = 0, oldest = 0, begun = 0, height = 0, firstLook = true, chosen = -1, ownChoice = false;
  let asked = 0, timer = null, ownMove = false;
  let moved = false, rowsMoved = false;  // by the user; otherwise all is shown
  let groups = [];
  let startToo = false;  // what was before the first sample: parts that start

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
    for (const range of [model.x, model.y]) range.change.connect(() => { if (!ownMove) { userMoved(range); } });
    model.bars.selected.change.connect(clicked);
    const view = Bokeh.index.find_one(plot), canvas = view.canvas_view.events_el;
    // The frame that a click would draw around everything; a style sheet does not reach it.
    canvas.style.outline = "none";
    // Over the names of the lanes the wheel is for their height; set before the tool sees it.
    window.addEventListener("wheel", (event) => {
      const across = event.clientX - canvas.getBoundingClientRect().left;
      named("wheel").dimensions = across < view.frame.bbox.left ? "height" : "width";
    }, { capture: true, passive: true });
    window.addEventListener("resize", soon);
    buttons();
    poll();
  }

  function move(range, start, end) {
    ownMove = true;
    range.setv({ start, end });
    ownMove = false;
  }

  function userMoved(range) {
    if (range === model.x) {
      moved = true;
      if (follow && newest > model.x.end) setFollow(false);
    } else rowsMoved = true;
    soon();
  }

  function soon() {
    clearTimeout(timer);
    timer = setTimeout(refresh, SETTLE_MS);
  }

  function setFollow(on) {
    follow = on;
    $("follow").checked = on;
    if (on) toNewest();
  }

  // The window keeps its width; before anybody has moved it, it shows all from the first sample on.
  function toNewest() {
    if (!moved) { whole(); return; }
    const width = model.x.end - model.x.start;
    move(model.x, newest + width * MARGIN - width, newest + width * MARGIN);
    soon();
  }

  function whole() {
    const first = startToo ? oldest : begun, width = Math.max(newest - first, 1);
    move(model.x, first - width * MARGIN, newest + width * MARGIN);
    moved = false;
    soon();
  }

  function wholeRun() {
    startToo = true;
    allRows();
    whole();
  }

  // With room for the numbers of versions above.
  function allRows() {
    const pixels = Math.max(100, model.plot.inner_height || 600);
    move(model.y, height, -height * NUMBERS_PX / (pixels - NUMBERS_PX));
    rowsMoved = false;
  }

  // A group of lanes that are too thin to be drawn one by one, alone.
  function openGroup(at) {
    const row = groups.find((each) => each.top <= at && at <= each.bottom + 1e-6);
    if (!row) return;
    const high = row.bottom - row.top, pixels = Math.max(100, model.plot.inner_height || 600);
    move(model.y, row.bottom + high * MARGIN, row.top - high * (MARGIN + NUMBERS_PX / (pixels - NUMBERS_PX)));
    rowsMoved = true;
    soon();
  }

  function zoom(factor) {
    const middle = (model.x.start + model.x.end) / 2, half = (model.x.end - model.x.start) / 2 * factor;
    move(model.x, middle - half, middle + half);
    moved = true;
    soon();
  }

  async function poll() {
    try {
      const state = await get("api/status");
      tell(state);
      newest = state.newest_ms;
      oldest = state.oldest_ms;
      begun = state.admitted_ms ?? oldest;
      if (state.events !== known) {
        known = state.events;
        if (firstLook && state.events) {
          firstLook = false;
          follow = state.live;
          $("follow").checked = follow;
          whole();
        } else if (follow || !moved) toNewest();
        else soon();
      }
    } catch (error) {
      lost(error);
    }
    setTimeout(poll, POLL_MS);
  }

  function lost(error) {
    $("told").textContent = `The server does not answer: is asyncrl timeline still running? (${error.message})`;
    $("told").className = "bad";
  }

  function tell(state) {
    $("phase").textContent = state.live ? `live · ${state.phase}` : state.phase;
    $("phase").className = `chip ${state.live ? "live" : state.phase}`;
    $("step").textContent = state.step === null ? "" :
      `step ${state.step}${state.total_steps ? ` of ${state.total_steps}` : ""} · version ${state.version}`;
    $("trouble").textContent = $("trouble").title = state.trouble;
    $("reading").textContent = state.read < 1 ? `reading events: ${Math.floor(state.read * 100)} %` : "";
  }

  async function refresh() {
    const number = ++asked, width = Math.max(100, model.plot.inner_width || 1000);
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
      lost(error);
      return;
    }
    if (number !== asked) return;
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
    // Of what is only partly in view, too.
    const top = model.y.end, bottom = model.y.start, pixel = (bottom - top) / Math.max(100, model.plot.inner_height || 600);
    model.versions.data = { ...view.versions, y: view.versions.x.map(() => Math.max(0, top + NUMBERS_PX * pixel)) };
    const seen = (row) => row.bottom > top && row.top < bottom;
    labels(model.groups, view.groups.filter(seen), (row) => (Math.max(row.top, top) + Math.min(row.bottom, bottom)) / 2);
    labels(model.blocks, view.blocks.filter(seen), (row) => Math.max(row.top, top) + LABEL_PX / 2 * pixel);
    blockList(view.all_blocks);
    const shown = view.bars.left.length, merged = view.merged;
    $("told").className = "";
    $("told").textContent = `${view.events.toLocaleString("en")} events` +
      (view.damaged ? ` (${view.damaged} damaged lines left out)` : "") +
      ` · ${shown.toLocaleString("en")} bars in view` +
      (merged ? `, ${merged.toLocaleString("en")} of them several in one` : "") +
      (view.crowded ? " · of many lanes: how many at a time (click: one by one)" : "") +
      (shown ? "" : " · nothing here: press “whole run”");
    document.body.dataset.bars = String(shown);
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
  }

  function choose(places) {
    ownChoice = true;
    model.bars.selected.indices = places;
    ownChoice = false;
  }

  // Labels that would lie upon the one above are left out.
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
      box.addEventListener("change", () => { hidden[box.checked ? "delete" : "add"](block); soon(); });
      label.append(box, ` ${block}`);
      return label;
    }));
  }

  function clicked() {
    const place = model.bars.selected.indices[0];
    if (place === undefined || ownChoice) return;
    const bar = Object.fromEntries(["event", "left", "right", "top", "bottom", "title"].map((name) => [name, model.bars.data[name][place]]));
    if (bar.event >= 0) { details(bar.event); return; }
    if (bar.title.includes(" at a time in ")) { openGroup(bar.bottom); return; }
    const margin = Math.max((bar.right - bar.left) * 0.1, 0.005);
    move(model.x, bar.left - margin, bar.right + margin);
    moved = true;
    soon();
  }

  async function details(event) {
    chosen = event;
    choose(model.bars.data.event.flatMap((each, n) => (each === event ? [n] : [])));
    $("panel").hidden = false;
    document.body.classList.add("opened");
    $("details").textContent = "looking…";
    try {
      const answer = await fetch(`details/${event}`, { cache: "no-store" });
      // Made by the server, which escapes what was said in the run.
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
    $("rows").addEventListener("click", () => { allRows(); soon(); });
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
