/**
 * The mask: details of the pair below the pointer (or below a cross that the arrow keys move), and a closer look. The
 * whole mask is drawn in the page; a part of it is drawn here from the slices, exact to the token at any scale.
 */
function maskChart(chart) {
  const picture = chart.querySelector("svg");
  const [x, y, width, height, q, k] = ["x", "y", "width", "height", "q", "k"].map((key) => Number(picture.dataset[key]));
  if (!q || !k) return;
  const plot = picture.querySelector(".mask-plot"), tools = document.getElementById("mask-tools");
  const zoomed = svg("g", {}), cross = svg("path", { class: "cursor" });
  picture.append(zoomed, cross);
  const owner = (axis, token) => data[axis].owner[Math.floor(token / data[axis].chunk)];
  // An unbounded diagonal is farther away than any token.
  const far = 2 ** 40;
  const bands = data.slices?.map(([q0, q1, k0, k1, low, high]) => ({ q0, q1, k0, k1, low: low ?? -far, high: high ?? far }));
  const view = { q0: 0, q1: q, k0: 0, k1: k };
  let at = null;

  /** Sum over rows [r0, r1) of row + diagonal, clamped to [lo, hi]. */
  const clamped = (r0, r1, lo, hi, diagonal) => {
    const a = Math.min(r1, Math.max(r0, lo - diagonal)), b = Math.min(r1, Math.max(a, hi - diagonal));
    return (a - r0) * lo + ((b - a) * (a + b - 1)) / 2 + (b - a) * diagonal + (r1 - b) * hi;
  };
  const area = (band, q0, q1, k0, k1) => {
    [q0, q1, k0, k1] = [Math.max(q0, band.q0), Math.min(q1, band.q1), Math.max(k0, band.k0), Math.min(k1, band.k1)];
    if (q0 >= q1 || k0 >= k1 || band.low > band.high) return 0;
    return clamped(q0, q1, k0, k1, band.high + 1) - clamped(q0, q1, k0, k1, band.low);
  };

  /** Limits in whole tokens of `pixels` even parts of [from, to); where a token is larger than a part, parts repeat it. */
  const limits = (from, to, length, pixels) => Array.from({ length: pixels }, (_, index) => {
    const step = (to - from) / pixels;
    const first = Math.min(length - 1, Math.floor(from + index * step));
    return [first, Math.min(length, Math.max(first + 1, Math.floor(from + (index + 1) * step)))];
  });
  /** Of several owners in a part, each is met as often as it owns rows: parts look at places that spread evenly. */
  const sampled = (axis, [first, last], index) => owner(axis, first + Math.floor((last - first) * ((index * 0.6180339887) % 1)));

  function raster() {
    const scale = Math.min(2, devicePixelRatio || 1) * plot.getBoundingClientRect().width / width;
    const columns = Math.max(1, Math.round(width * scale)), lines = Math.max(1, Math.round(height * scale));
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [columns, lines];
    const context = canvas.getContext("2d"), image = context.createImageData(columns, lines);
    const style = getComputedStyle(document.documentElement);
    const colors = Array.from({ length: rankColors }, (_, index) => {
      const color = style.getPropertyValue(`--rank-${index}`).trim();
      return [1, 3, 5].map((digit) => parseInt(color.slice(digit, digit + 2), 16));
    });
    const visible = bands.filter((b) => b.q0 < view.q1 && b.q1 > view.q0 && b.k0 < view.k1 && b.k1 > view.k0);
    const rows = limits(view.q0, view.q1, q, lines), keys = limits(view.k0, view.k1, k, columns);
    const perToken = columns / (view.k1 - view.k0), sums = new Float64Array(columns);
    rows.forEach(([q0, q1], line) => {
      sums.fill(0);
      for (const band of visible) {
        if (band.q0 >= q1 || band.q1 <= q0) continue;
        const low = Math.max(band.k0, q0 + band.low), high = Math.min(band.k1, q1 + band.high);
        const first = Math.max(0, Math.floor((low - view.k0) * perToken) - 1);
        const last = Math.min(columns, Math.ceil((high - view.k0) * perToken) + 1);
        for (let column = first; column < last; column++) sums[column] += area(band, q0, q1, keys[column][0], keys[column][1]);
      }
      const color = colors[sampled("q", [q0, q1], line) % rankColors];
      for (let column = 0; column < columns; column++) {
        if (sums[column] === 0) continue;
        const density = sums[column] / ((q1 - q0) * (keys[column][1] - keys[column][0]));
        image.data.set([...color, Math.round(255 * (0.18 + 0.82 * density))], 4 * (line * columns + column));
      }
    });
    context.putImageData(image, 0, 0);
    return svg("image", { x, y, width, height, href: canvas.toDataURL(), preserveAspectRatio: "none", "image-rendering": "pixelated" });
  }

  function strip(axis, from, to, length) {
    const group = svg("g", { class: "mask-owners" }), vertical = axis === "q";
    const { chunk } = data[axis], pixel = (token) => (token - from) / (to - from) * length;
    const parts = (to - from) / chunk <= 400
      ? Array.from({ length: Math.ceil(to / chunk) - Math.floor(from / chunk) }, (_, index) => {
        const first = (Math.floor(from / chunk) + index) * chunk;
        return [owner(axis, first), Math.max(0, pixel(first)), Math.min(length, pixel(first + chunk))];
      })
      : limits(from, to, data[axis].rows, 400).map((part, index) => [sampled(axis, part, index), index * length / 400, (index + 1) * length / 400]);
    const runs = [];
    for (const [rank, start, end] of parts) {
      const last = runs.at(-1);
      if (last?.[0] === rank) last[2] = end;
      else runs.push([rank, start, end]);
    }
    for (const [rank, start, end] of runs) {
      const size = end - start, [px, py] = vertical ? [x + width + 4, y + start] : [x + start, y - 17];
      const [wide, tall] = vertical ? [13, size] : [size, 13];
      group.append(svg("rect", { x: px, y: py, width: wide, height: tall, fill: rankColor(rank) }));
      if (size >= 11 + (vertical ? 0 : 6 * (String(rank).length - 1)) && (rank < 100 || !vertical)) {
        group.append(svg("text", { class: "mask-owner", x: px + wide / 2, y: py + tall / 2 }, String(rank)));
      }
    }
    return group;
  }

  function chunkLines() {
    const { chunk } = data.q, unit = height / (view.q1 - view.q0), path = [];
    if (chunk * unit >= 5) {
      for (let token = Math.ceil(view.q0 / chunk) * chunk; token < view.q1; token += chunk) path.push(`M${x} ${y + (token - view.q0) * unit}h${width}`);
    }
    return svg("path", { class: "mask-chunks", d: path.join("") });
  }

  const tokens = (token) => {
    const [thousand, million] = [1024, 1048576];
    if (token > 0 && token % million === 0) return `${count(token / million)}M`;
    return token > 0 && token % thousand === 0 ? `${count(token / thousand)}k` : count(token);
  };
  function axes() {
    const group = svg("g", { class: "mask-axes" }), path = [];
    for (const [from, to, length, room, vertical] of [[view.k0, view.k1, width, 75, false], [view.q0, view.q1, height, 50, true]]) {
      const step = 2 ** Math.max(0, Math.ceil(Math.log2((to - from) / Math.max(2, Math.floor(length / room)))));
      for (let token = Math.ceil(from / step) * step; token <= to; token += step) {
        const place = (token - from) / (to - from) * length;
        if (vertical) {
          path.push(`M${x - 4} ${y + place}h3`);
          group.append(svg("text", { class: "mask-q", x: x - 7, y: y + place + 3.5 }, tokens(token)));
        } else {
          path.push(`M${x + place} ${y - 20}v3`);
          group.append(svg("text", { x: x + place, y: y - 23 }, tokens(token)));
        }
      }
    }
    group.append(svg("path", { d: path.join("") }));
    return group;
  }

  const whole = () => view.q1 - view.q0 >= q && view.k1 - view.k0 >= k;
  function draw() {
    picture.classList.toggle("zoomed", !whole());
    zoomed.replaceChildren();
    if (!whole()) zoomed.append(raster(), chunkLines(), strip("q", view.q0, view.q1, height), strip("k", view.k0, view.k1, width), axes());
    if (tools) tools.querySelector("output").textContent = whole() ? "all tokens"
      : `queries ${count(view.q0)} to ${count(view.q1)}, keys ${count(view.k0)} to ${count(view.k1)}`;
  }
  /** Shows `share` of the present extent with the pair (row, column) where it is; never beyond the mask. */
  function zoom(share, row = (view.q0 + view.q1) / 2, column = (view.k0 + view.k1) / 2) {
    if (!bands) return;
    // Both axes keep their scale: the larger extent decides when it is enough.
    const least = 8 / Math.min(view.q1 - view.q0, view.k1 - view.k0);
    const factor = Math.max(share, Math.min(1, least));
    for (const [start, end, length, place] of [["q0", "q1", q, row], ["k0", "k1", k, column]]) {
      const extent = Math.min(length, (view[end] - view[start]) * factor);
      move(start, end, length, place - (place - view[start]) * extent / (view[end] - view[start]), extent);
    }
    draw();
  }
  function move(start, end, length, from, extent) {
    view[start] = Math.min(Math.max(0, from), length - extent);
    view[end] = view[start] + extent;
  }

  /** The pair below a point of the window, or null. */
  const pair = (clientX, clientY) => {
    const box = plot.getBoundingClientRect();
    const column = Math.floor(view.k0 + (clientX - box.left) / box.width * (view.k1 - view.k0));
    const row = Math.floor(view.q0 + (clientY - box.top) / box.height * (view.q1 - view.q0));
    const inside = row >= view.q0 - 1 && column >= view.k0 - 1 && row >= 0 && column >= 0 && row < Math.min(q, view.q1) && column < Math.min(k, view.k1);
    return inside ? [row, column] : null;
  };
  const describe = ([row, column], under) => {
    let verdict;
    if (bands) {
      const sees = (b) => row >= b.q0 && row < b.q1 && column >= b.k0 && column < b.k1 && column - row >= b.low && column - row <= b.high;
      verdict = bands.some(sees) ? "unmasked" : "masked";
    } else {
      const level = Number(/^d([1-8])$/.exec(under?.getAttribute?.("class") ?? "")?.[1] ?? 0);
      verdict = level === 0 ? "masked" : level === 8 ? "unmasked" : `in a cell of which about ${percent((level - 0.5) / 8)} are unmasked`;
    }
    const [a, b] = [owner("q", row), owner("k", column)];
    return `query ${count(row)}: chunk ${Math.floor(row / data.q.chunk)}, rank ${a}\n`
      + `key ${count(column)}: chunk ${Math.floor(column / data.k.chunk)}, ${a === b ? "its own" : `from rank ${b}`}\n${verdict}`;
  };
  const show = (clientX, clientY) => {
    const [px, py] = [x + (at[1] + 0.5 - view.k0) / (view.k1 - view.k0) * width, y + (at[0] + 0.5 - view.q0) / (view.q1 - view.q0) * height];
    cross.setAttribute("d", `M${x} ${py}H${x + width}M${px} ${y}V${y + height}`);
    showTip(describe(at, document.elementFromPoint(clientX, clientY)), clientX, clientY);
  };
  const leave = () => {
    at = null;
    cross.removeAttribute("d");
    hideTip();
  };

  let drag = null;
  chart.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && !whole()) drag = { x: event.clientX, y: event.clientY, ...view, moved: false };
  });
  chart.addEventListener("pointermove", (event) => {
    if (drag && (drag.moved || Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 3)) {
      if (!drag.moved) chart.setPointerCapture(event.pointerId);
      drag.moved = true;
      const box = plot.getBoundingClientRect();
      move("q0", "q1", q, drag.q0 - (event.clientY - drag.y) / box.height * (drag.q1 - drag.q0), drag.q1 - drag.q0);
      move("k0", "k1", k, drag.k0 - (event.clientX - drag.x) / box.width * (drag.k1 - drag.k0), drag.k1 - drag.k0);
      leave();
      return draw();
    }
    at = pair(event.clientX, event.clientY);
    if (at) show(event.clientX, event.clientY);
    else leave();
  });
  for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) chart.addEventListener(name, () => { drag = null; });
  chart.addEventListener("pointerleave", leave);
  chart.addEventListener("blur", leave);
  chart.addEventListener("dblclick", (event) => {
    const place = pair(event.clientX, event.clientY);
    if (place) zoom(0.4, ...place);
  });
  chart.addEventListener("wheel", (event) => {
    const place = (event.ctrlKey || event.metaKey) && pair(event.clientX, event.clientY);
    if (!place || !bands) return;
    event.preventDefault();
    zoom(1.0015 ** event.deltaY, ...place);
  }, { passive: false });
  tools?.addEventListener("click", (event) => {
    const way = event.target.dataset?.mask;
    if (way === "in") zoom(0.5, ...(at ?? []));
    else if (way === "out") zoom(2);
    else if (way === "all") zoom(Infinity);
  });
  chart.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Escape") return leave();
    if (event.key === "+" || event.key === "=") zoom(0.5, ...(at ?? []));
    else if (event.key === "-") zoom(2, ...(at ?? []));
    else if (event.key === "0") zoom(Infinity);
    else if (!step) return;
    event.preventDefault();
    if (step) {
      // A step is a hundredth of the side, with Shift one token.
      const size = (from, to) => (event.shiftKey ? 1 : Math.max(1, Math.round((to - from) / 100)));
      const within = (value, from, to) => Math.min(Math.ceil(to) - 1, Math.max(Math.floor(from), value));
      at = at
        ? [within(at[0] + step[0] * size(view.q0, view.q1), view.q0, view.q1), within(at[1] + step[1] * size(view.k0, view.k1), view.k0, view.k1)]
        : [Math.floor((view.q0 + view.q1) / 2), Math.floor((view.k0 + view.k1) / 2)];
    }
    if (!at) return;
    const box = plot.getBoundingClientRect();
    show(
      box.left + (at[1] + 0.5 - view.k0) / (view.k1 - view.k0) * box.width,
      box.top + (at[0] + 0.5 - view.q0) / (view.q1 - view.q0) * box.height,
    );
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

maskChart(document.getElementById("mask-chart"));
