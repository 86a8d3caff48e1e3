/** Lanes of ranks and streams; measured above predicted. At most 32 lanes at once, the rest by pages. */
function timeline(section) {
  const chart = document.getElementById("timeline-chart");
  const state = { pass: data.passes[0], source: "both", order: "by rank", page: 0, from: 0, to: 1 };
  const mostLanes = 32;
  let lanes = [], width = 0, geometry = null;

  const sourcesOf = (pass) => data.passes.includes(pass)
    ? pass.order.filter((name) => pass.sources[name] && (state.source === "both" || state.source === name))
    : [];
  const sources = () => {
    const chosen = sourcesOf(state.pass);
    // A pass may lack the source that was chosen for another.
    return chosen.length ? chosen : state.pass.order.filter((name) => state.pass.sources[name]);
  };
  const end = () => Math.max(1, ...Object.values(state.pass.sources).map((source) => source.seconds * 1e9));
  const perPage = () => Math.max(1, Math.floor(mostLanes / Math.max(1, sources().length * state.pass.streams.length)));
  const ordered = () => {
    const ranks = [...state.pass.ranks];
    if (state.order === "by rank") return ranks;
    const best = state.pass.sources.measured ?? state.pass.sources.predicted;
    return ranks.sort((a, b) => best.rankSeconds[b] - best.rankSeconds[a] || a - b);
  };
  const pages = () => Math.max(1, Math.ceil(state.pass.ranks.length / perPage()));
  const whole = () => [state.from, state.to] = [0, end()];

  const byRank = new Map();
  for (const pass of data.passes) {
    for (const [name, source] of Object.entries(pass.sources)) {
      for (const span of source.spans) {
        const key = `${pass.name} ${name} ${span[0]}`;
        if (!byRank.has(key)) byRank.set(key, []);
        byRank.get(key).push(span);
      }
    }
  }

  const text = (pass, name, source, [rank, stream, label, kind, stage, start, length]) => () =>
    `${source.labels[label]}\nrank ${rank}, ${source.streams[stream]}, ${name}\n`
    + `${kind}${stage < 0 ? "" : `, stage ${stage}`}\n${time(start)} to ${time(start + length)}\nfor ${time(length)}`;

  function draw() {
    width = chart.clientWidth;
    const narrow = width < 560;
    const left = narrow ? 46 : 168, head = 26, right = 6;
    const plot = width - left - right, shown = sources();
    const page = ordered().slice(state.page * perPage(), (state.page + 1) * perPage());
    const streams = state.pass.streams;
    const heights = { measured: 16, predicted: shown.length > 1 ? 11 : 16 };
    const picture = svg("svg", { role: "img", "aria-label": `Timeline of the ${state.pass.name}` });
    const x = (ns) => left + (ns - state.from) / (state.to - state.from) * plot;
    const marks = svg("g", { "clip-path": "url(#timeline-clip)" }), labels = svg("g", {});
    let y = head;
    lanes = [];
    for (const rank of page) {
      labels.append(svg("path", { class: "grid", d: `M0 ${y + 0.5}H${width}` }));
      labels.append(svg("text", { class: "strong", x: 0, y: y + 15 }, narrow ? String(rank) : `rank ${rank}`));
      y += 4;
      streams.forEach((stream) => {
        const top = y;
        for (const name of shown) {
          const source = state.pass.sources[name], tall = heights[name], lane = [];
          for (const span of byRank.get(`${state.pass.name} ${name} ${rank}`) ?? []) {
            const [, index, label, kind, stage, start, length] = span;
            if (source.streams[index] !== stream || start > state.to || start + length < state.from) continue;
            const thin = kind === "wait" ? tall * 0.3 : 0;
            const x0 = Math.max(x(start), left - 2), x1 = Math.min(x(start + length), left + plot + 2);
            const wide = Math.max(x1 - x0, 0.75);
            const rect = svg("rect", { class: `span ${kind} ${name}`, x: x0, y: y + thin, width: wide, height: tall - 2 * thin });
            lane.push(mark(rect, text(state.pass, name, source, span)));
            marks.append(rect);
            const words = stage < 0 ? source.labels[label] : `${stage} · ${source.labels[label]}`;
            const fits = Math.floor((wide - 8) / 6.2);
            if (kind !== "wait" && tall >= 16 && fits >= 1 && (words.length <= fits || fits >= 4 || stage >= 0)) {
              const short = words.length <= fits ? words : fits >= 5 ? `${words.slice(0, fits - 1)}…` : String(stage >= 0 ? stage : "");
              marks.append(svg("text", { class: `inside ${kind} ${name}`, x: x0 + 4, y: y + 12 }, short));
            }
          }
          lanes.push(lane);
          labels.append(svg("rect", { class: "lane", x: left, y, width: plot, height: tall, fill: "none" }));
          y += tall + 1;
        }
        if (!narrow) labels.append(svg("text", { x: left - 8, y: (top + y) / 2 + 3.5, "text-anchor": "end" }, stream));
        y += 2;
      });
      y += 2;
    }
    const step = roundStep((state.to - state.from) / Math.max(2, plot / 90));
    const ticks = [];
    for (let ns = Math.ceil(state.from / step) * step; ns <= state.to; ns += step) {
      ticks.push(`M${x(ns)} ${head - 4}V${y}`);
      const near = x(ns) > left + plot - 24 ? "end" : "middle";
      labels.append(svg("text", { x: x(ns), y: 14, "text-anchor": near }, time(Math.round(ns), step)));
    }
    picture.setAttribute("viewBox", `0 0 ${width} ${y + 2}`);
    picture.append(
      svg("defs", {}, svg("clipPath", { id: "timeline-clip" }, svg("rect", { x: left, y: 0, width: plot, height: y + 2 }))),
      svg("path", { class: "grid", d: ticks.join("") }), labels, marks,
    );
    chart.replaceChildren(picture);
    geometry = { left, plot };

    const kept = state.pass.ranks.length, all = state.pass.worldSize;
    const first = state.page * perPage() + 1, last = Math.min(kept, (state.page + 1) * perPage());
    section.querySelector("output").textContent = pages() === 1
      ? (kept === 1 ? "the only rank" : `all ${kept} ranks`)
      : `${first === last ? first : `${first}–${last}`} of ${kept} ranks${kept < all ? ` (selected from ${count(all)})` : ""}`;
    section.querySelector("[data-page='-1']").disabled = state.page === 0;
    section.querySelector("[data-page='1']").disabled = state.page + 1 >= pages();
    const choice = section.querySelector("select");
    if (choice) choice.value = state.pass.name;
    for (const row of section.querySelectorAll("[data-of]")) row.hidden = row.dataset.of !== state.pass.name;
    for (const key of ["pass", "source", "order"]) {
      const now = key === "pass" ? state.pass.name : state[key];
      for (const button of section.querySelectorAll(`[data-${key}]`)) {
        button.setAttribute("aria-pressed", String(button.dataset[key] === now));
      }
    }
  }

  /** Makes the view `factor` as long, with the moment `at` where it is; never beyond the run, never below 100 ns. */
  function zoom(factor, at = (state.from + state.to) / 2) {
    const length = Math.min(end(), Math.max(100, (state.to - state.from) * factor));
    const share = (at - state.from) / (state.to - state.from);
    view(at - share * length, length);
  }
  function view(from, length) {
    state.from = Math.min(Math.max(0, from), end() - length);
    state.to = state.from + length;
    draw();
  }
  const moment = (clientX) => {
    const box = chart.getBoundingClientRect();
    return state.from + (clientX - box.left - geometry.left) / geometry.plot * (state.to - state.from);
  };

  function show(name) {
    state.pass = data.passes.find((each) => each.name === name);
    state.page = 0;
    whole();
  }
  section.addEventListener("change", (event) => {
    show(event.target.value);
    draw();
  });
  section.addEventListener("click", (event) => {
    const { pass, source, order, page, zoom: way } = event.target.dataset ?? {};
    if (pass) show(pass);
    else if (source) [state.source, state.page] = [source, 0];
    else if (order) [state.order, state.page] = [order, 0];
    else if (page) state.page = Math.min(pages() - 1, Math.max(0, state.page + Number(page)));
    else if (way === "all") whole();
    else if (way) return zoom(way === "in" ? 0.5 : 2);
    else return;
    draw();
  });
  chart.addEventListener("wheel", (event) => {
    // A bare wheel scrolls the page; with Ctrl (also what a pinch sends) or sideways it is meant for the chart.
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(1.0015 ** event.deltaY, moment(event.clientX));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      view(state.from + event.deltaX / geometry.plot * (state.to - state.from), state.to - state.from);
    }
  }, { passive: false });
  chart.addEventListener("dblclick", (event) => zoom(0.4, moment(event.clientX)));
  let drag = null;
  chart.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { x: event.clientX, from: state.from, moved: false };
  });
  chart.addEventListener("pointermove", (event) => {
    if (!drag) return;
    if (!drag.moved && Math.abs(event.clientX - drag.x) < 4) return;
    if (!drag.moved) {
      drag.moved = true;
      chart.setPointerCapture(event.pointerId);
      chart.classList.add("dragging");
    }
    view(drag.from - (event.clientX - drag.x) / geometry.plot * (state.to - state.from), state.to - state.from);
  });
  for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) {
    chart.addEventListener(name, () => {
      drag = null;
      chart.classList.remove("dragging");
    });
  }
  chart.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0") { whole(); draw(); }
    else return;
    event.preventDefault();
  });
  details(chart, () => lanes);
  whole();
  drawn(chart, draw);
}

const timelineSection = document.getElementById("timeline");
if (timelineSection) timeline(timelineSection);
document.documentElement.dataset.drawn = "yes";
