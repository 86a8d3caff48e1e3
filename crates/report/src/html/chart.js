const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const rankColors = 24;

const count = (value) => Math.round(value).toLocaleString("en-US");
const percent = (part) => `${(part * 100).toFixed(part < 0.1 ? 2 : 1)} %`;
const rankColor = (rank) => `var(--rank-${rank % rankColors})`;

function bytes(value) {
  const unit = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([factor]) => value >= factor);
  return unit ? `${(value / unit[0]).toPrecision(3)} ${unit[1]}` : `${value} B`;
}

/** Nanoseconds as text, with the digits that `step` (the distance of neighbouring values) calls for. */
function time(ns, step = ns / 1000) {
  if (ns === 0) return "0";
  const [factor, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "us"], [1, "ns"]].find(([f]) => Math.abs(ns) >= f) ?? [1, "ns"];
  const digits = step > 0 ? Math.min(6, Math.max(0, Math.ceil(-Math.log10(step / factor) - 1e-9))) : 0;
  return `${(ns / factor).toFixed(digits)} ${unit}`;
}

/** The smallest of 1, 2, 5 times a power of ten that is at least `least`. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * 0.999999);
}

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Draws now and whenever the width of `element` changes. */
function drawn(element, draw) {
  let width = 0;
  const redraw = () => {
    if (element.clientWidth === width || element.clientWidth === 0) return;
    width = element.clientWidth;
    draw(width);
  };
  redraw();
  new ResizeObserver(redraw).observe(element);
}

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth - 8 ? x - 14 - width : x + 14;
  const top = y + 16 + height > innerHeight - 8 ? y - 12 - height : y + 16;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}

/**
 * Details of a chart's marks, by pointer and by keyboard alike. `rows()` gives the marks in reading order, a list of
 * lists of {element, text()}; the arrow keys walk over them.
 */
function details(chart, rows) {
  let at = null;
  const outline = (mark) => {
    chart.querySelector(".cursor")?.remove();
    if (!mark) return;
    const box = mark.element.getBBox();
    mark.element.ownerSVGElement.append(
      svg("rect", { class: "cursor", x: box.x - 1, y: box.y - 1, width: box.width + 2, height: box.height + 2, rx: 2 }),
    );
  };
  const leave = () => {
    at = null;
    outline(null);
    hideTip();
  };
  chart.addEventListener("pointermove", (event) => {
    const mark = event.target.mark;
    if (!mark || event.buttons) return leave();
    outline(mark);
    showTip(mark.text(), event.clientX, event.clientY);
  });
  chart.addEventListener("pointerleave", leave);
  chart.addEventListener("blur", leave);
  chart.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const all = rows().filter((row) => row.length);
    if (!step || event.ctrlKey || event.altKey || event.metaKey || !all.length) return;
    event.preventDefault();
    const center = (mark) => {
      const box = mark.element.getBoundingClientRect();
      return box.left + box.width / 2;
    };
    let row = all.findIndex((marks) => marks.includes(at));
    if (row < 0) {
      [row, at] = [0, all[0][0]];
    } else if (step[1]) {
      const marks = all[row];
      at = marks[Math.min(marks.length - 1, Math.max(0, marks.indexOf(at) + step[1]))];
    } else {
      const x = center(at);
      const marks = all[Math.min(all.length - 1, Math.max(0, row + step[0]))];
      at = marks.reduce((best, mark) => (Math.abs(center(mark) - x) < Math.abs(center(best) - x) ? mark : best));
    }
    at.element.scrollIntoView({ block: "nearest", inline: "nearest" });
    outline(at);
    const box = at.element.getBoundingClientRect();
    showTip(at.text(), box.left + box.width / 2, box.bottom - 8);
  });
}

/** Gives a drawn element its details, which are also its title. */
function mark(element, text) {
  element.mark = { element, text };
  return element.mark;
}
