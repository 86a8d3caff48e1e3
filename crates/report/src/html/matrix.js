/** Owner by receiver; the darker, the more rows. */
function matrix(chart) {
  const { group, entries } = data.matrix;
  const ranks = data.area.length, cells = Math.ceil(ranks / group);
  const most = Math.max(...entries.map((entry) => entry[2]));
  const name = (cell) => (group === 1 ? `rank ${cell}` : `ranks ${cell * group} to ${Math.min(ranks, (cell + 1) * group) - 1}`);
  let unit = "rows", marks = [];
  const amount = (rows) => (unit === "rows" ? `${count(rows)} rows` : bytes(rows * data.rowBytes));
  details(chart, () => marks);

  const draw = (width) => {
    const left = 26 + 7 * String(ranks - 1).length, head = 34, foot = 26;
    const side = Math.min(width - left - 4, 420), pitch = side / cells;
    const height = head + side + foot;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Communication matrix of ${ranks} ranks, at most ${amount(most)} in a cell` });
    const x0 = left + Math.max(0, (width - left - 4 - side) / 2);
    picture.append(svg("rect", { class: "grid", x: x0, y: head, width: side, height: side }));
    picture.append(svg("path", { class: "grid", d: `M${x0} ${head}l${side} ${side}` }));
    marks = Array.from({ length: cells }, () => []);
    const gap = pitch > 8 ? 1 : 0;
    for (const [owner, receiver, rows] of entries) {
      const rect = svg("rect", {
        class: "cell", x: x0 + receiver * pitch + gap / 2, y: head + owner * pitch + gap / 2,
        width: pitch - gap, height: pitch - gap,
        // The square root keeps small amounts visible among large ones.
        "fill-opacity": (0.12 + 0.88 * Math.sqrt(rows / most)).toFixed(3),
      });
      picture.append(rect);
      const label = amount(rows).replace(" rows", "");
      if (pitch > 58) {
        picture.append(svg("text", { class: rows > most * 0.25 ? "oncell" : "strong", "pointer-events": "none", x: x0 + (receiver + 0.5) * pitch, y: head + (owner + 0.5) * pitch + 4, "text-anchor": "middle" }, label));
      }
      marks[owner].push(mark(rect, () => {
        const other = data.rowBytes ? (unit === "rows" ? ` (${bytes(rows * data.rowBytes)})` : ` (${count(rows)} rows)`) : "";
        return `${name(owner)} → ${name(receiver)}\n${amount(rows)}${other}`;
      }));
    }
    const every = Math.ceil(cells / Math.max(1, Math.floor(side / 30)));
    for (let cell = 0; cell < cells; cell += every) {
      const at = (cell + 0.5) * pitch, text = String(cell * group);
      picture.append(
        svg("text", { x: x0 + at, y: head - 6, "text-anchor": "middle" }, text),
        svg("text", { x: x0 - 6, y: head + at + 4, "text-anchor": "end" }, text),
      );
    }
    picture.append(
      svg("text", { class: "strong", x: x0 + side / 2, y: 12, "text-anchor": "middle" }, "receiver →"),
      svg("text", { class: "strong", x: 0, y: 0, "text-anchor": "middle", transform: `translate(${x0 - left + 12} ${head + side / 2}) rotate(-90)` }, "← owner"),
    );
    const y = height - 14;
    for (let step = 0; step < 8; step++) {
      picture.append(svg("rect", { class: "cell key", x: x0 + step * 14, y: y, width: 14, height: 10, "fill-opacity": 0.12 + 0.88 * Math.sqrt((step + 0.5) / 8) }));
    }
    picture.append(svg("text", { x: x0 + 120, y: y + 9 }, `up to ${amount(most)} ${group > 1 ? `(cells of ${group} × ${group} ranks)` : ""}`));
    chart.replaceChildren(picture);
  };
  drawn(chart, draw);

  const buttons = ["rows", "bytes"].map((id) => [id, document.getElementById(`matrix-${id}`)]).filter(([, button]) => button);
  for (const [id, button] of buttons) {
    button.addEventListener("click", () => {
      unit = id;
      for (const [other, each] of buttons) each.setAttribute("aria-pressed", String(other === id));
      draw(chart.clientWidth);
    });
  }
}

const matrixChart = document.getElementById("matrix-chart");
if (matrixChart) matrix(matrixChart);
