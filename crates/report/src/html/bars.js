/** Bars of one value a rank; of many ranks, neighbours share a bar that shows their largest. */
function bars(chart, values, unit) {
  const group = Math.ceil(values.length / 128);
  const bins = [];
  for (let first = 0; first < values.length; first += group) {
    const part = values.slice(first, first + group);
    bins.push({ first, part, max: Math.max(...part), min: Math.min(...part) });
  }
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  const top = Math.max(...values, 1);
  let marks = [];
  details(chart, () => [marks]);
  drawn(chart, (width) => {
    const height = 190, left = 4, head = 22, foot = 20;
    const base = height - foot, scale = (base - head) / top, pitch = (width - left) / bins.length;
    const gap = pitch > 6 ? Math.min(4, pitch * 0.18) : 0;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${unit}: mean ${count(mean)}, largest ${count(top)}` });
    marks = bins.map((bin, index) => {
      const x = left + index * pitch, tall = Math.max(bin.max > 0 ? 1 : 0, bin.max * scale);
      const rect = svg("rect", {
        class: "bar", x: x + gap / 2, y: base - tall, width: Math.max(pitch - gap, 0.5), height: tall,
        fill: group === 1 ? rankColor(bin.first) : "var(--plain)", rx: pitch > 12 ? 2 : 0,
      });
      // The whole column reacts, so that a low bar is as easy to point at as a tall one.
      const column = svg("rect", { class: "column", x, y: head - 4, width: pitch, height: base - head + 4, fill: "transparent" });
      const shares = bin.part.map((value) => (mean > 0 ? value / mean : 1));
      const text = () => group === 1
        ? `rank ${bin.first}\n${count(bin.max)} ${unit}\n${shares[0].toFixed(3)} of the mean`
        : `ranks ${bin.first} to ${bin.first + bin.part.length - 1}\nlargest ${count(bin.max)} ${unit} (${Math.max(...shares).toFixed(3)} of the mean)\nsmallest ${count(bin.min)}`;
      picture.append(rect, column);
      return (column.mark = mark(rect, text));
    });
    const every = Math.ceil(bins.length / Math.max(1, Math.floor(width / 34)));
    bins.forEach((bin, index) => {
      if (index % every === 0) {
        const x = left + (index + 0.5) * pitch, near = x > width - 12;
        picture.append(svg("text", { x: near ? width : x, y: height - 5, "text-anchor": near ? "end" : "middle" }, String(bin.first)));
      }
    });
    const y = base - mean * scale;
    picture.append(
      svg("path", { class: "grid", d: `M${left} ${base + 0.5}H${width}` }),
      svg("path", { class: "mean", "pointer-events": "none", d: `M${left} ${y}H${width}` }),
      svg("text", { class: "strong", x: left, y: 12 }, `mean ${count(mean)}`),
      svg("text", { x: width, y: 12, "text-anchor": "end" }, `largest ${count(Math.max(...values))}`),
    );
    chart.replaceChildren(picture);
  });
}

bars(document.getElementById("area-chart"), data.area, "pairs");
bars(document.getElementById("recv-chart"), data.recv, "key rows");
