/** The pair below the pointer, or below a cross that the arrow keys move. */
function maskDetails(chart) {
  const picture = chart.querySelector("svg");
  const [x, y, width, height, q, k] = ["x", "y", "width", "height", "q", "k"].map((key) => Number(picture.dataset[key]));
  if (!q || !k) return;
  const plot = picture.querySelector(".mask-plot");
  const cross = svg("path", { class: "cursor" });
  picture.append(cross);
  const owner = (axis, token) => data[axis].owner[Math.floor(token / data[axis].chunk)];
  let at = null;

  const describe = (row, column, under) => {
    const level = Number(/^d([1-8])$/.exec(under?.getAttribute?.("class") ?? "")?.[1] ?? 0);
    const [a, b] = [owner("q", row), owner("k", column)];
    const unmasked = level === 0 ? "masked" : level === 8 ? "unmasked" : `about ${percent((level - 0.5) / 8)} unmasked`;
    const from = a === b ? "its own" : `from rank ${b}`;
    return `query ${count(row)}: chunk ${Math.floor(row / data.q.chunk)}, rank ${a}\nkey ${count(column)}: chunk ${Math.floor(column / data.k.chunk)}, ${from}\n${unmasked}`;
  };
  const show = (row, column, clientX, clientY) => {
    const px = x + (column + 0.5) / k * width, py = y + (row + 0.5) / q * height;
    cross.setAttribute("d", `M${x} ${py}H${x + width}M${px} ${y}V${y + height}`);
    showTip(describe(row, column, document.elementFromPoint(clientX, clientY)), clientX, clientY);
  };
  const leave = () => {
    at = null;
    cross.removeAttribute("d");
    hideTip();
  };
  chart.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / box.width * k);
    const row = Math.floor((event.clientY - box.top) / box.height * q);
    if (row < 0 || column < 0 || row >= q || column >= k) return leave();
    at = [row, column];
    show(row, column, event.clientX, event.clientY);
  });
  chart.addEventListener("pointerleave", leave);
  chart.addEventListener("blur", leave);
  chart.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    // A step is a hundredth of the side, with Shift one token.
    const size = (length) => (event.shiftKey ? 1 : Math.max(1, Math.round(length / 100)));
    const within = (value, length) => Math.min(length - 1, Math.max(0, value));
    const [row, column] = at ?? [Math.floor(q / 2), Math.floor(k / 2)];
    at = at ? [within(row + step[0] * size(q), q), within(column + step[1] * size(k), k)] : [row, column];
    const box = plot.getBoundingClientRect();
    show(...at, box.left + (at[1] + 0.5) / k * box.width, box.top + (at[0] + 0.5) / q * box.height);
  });
}

maskDetails(document.getElementById("mask-chart"));
