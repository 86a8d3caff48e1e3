// Uses the page as a reader would, by pointer and by keyboard, and leaves what it saw in the document.
(() => {
  const seen = {};
  const tip = document.getElementById("tip");
  const said = () => (tip.hidden ? null : tip.textContent);
  const point = (element, type = "pointermove", more = {}) => {
    const box = element.getBoundingClientRect();
    element.dispatchEvent(new PointerEvent(type, {
      bubbles: true, clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, ...more,
    }));
  };
  const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const all = (selector) => [...document.querySelectorAll(selector)];
  const get = (selector) => document.querySelector(selector);
  const hovered = (selector) => {
    const element = get(selector);
    if (!element) return null;
    point(element);
    const text = said();
    element.closest(".chart").dispatchEvent(new PointerEvent("pointerleave"));
    return text;
  };
  const walked = (chart, keys) => {
    if (!get(chart)) return null;
    get(chart).focus();
    const texts = keys.map((key) => { press(get(chart), key); return said(); });
    get(chart).blur();
    return { texts, after: said() };
  };

  seen.areaBars = all("#area-chart .bar").length;
  seen.recvBars = all("#recv-chart .bar").length;
  seen.means = all(".chart path.mean").length;
  seen.cells = all("#matrix-chart .cell:not(.key)").length;
  seen.lanes = all("#timeline-chart .lane").length;
  seen.spans = all("#timeline-chart .span").length;
  seen.maskPaths = all("#mask-chart .mask-cells path").length;
  seen.rankRows = all("#ranks tbody tr").length;
  seen.barTip = hovered("#area-chart .column");
  seen.cellTip = hovered("#matrix-chart .cell:not(.key)");
  seen.spanTip = hovered("#timeline-chart .span");
  seen.tipAfterLeave = said();
  const plot = get("#mask-chart .mask-plot");
  if (plot) {
    point(plot);
    seen.maskTip = said();
    get("#mask-chart").dispatchEvent(new PointerEvent("pointerleave"));
  }

  seen.barKeys = walked("#area-chart", ["ArrowRight", "ArrowRight", "ArrowLeft"]);
  seen.spanKeys = walked("#timeline-chart", ["ArrowRight", "ArrowRight", "ArrowDown", "Escape"]);
  seen.cellKeys = walked("#matrix-chart", ["ArrowRight", "ArrowDown"]);
  seen.maskKeys = walked("#mask-chart", ["ArrowRight", "ArrowRight", "ArrowUp"]);

  const closer = get("[data-mask=in]");
  if (closer) {
    const shown = () => get("#mask-tools output").textContent;
    closer.click();
    closer.click();
    seen.maskZoomed = shown();
    seen.maskImages = all("#mask-chart image").length;
    const pixels = () => get("#mask-chart image")?.getAttribute("href");
    const first = pixels();
    point(plot);
    seen.maskZoomedTip = said();
    press(get("#mask-chart"), "-");
    seen.maskRedrawn = pixels() !== first;
    seen.maskOwnerRuns = all("#mask-chart .mask-owners rect").length;
    get("[data-mask=all]").click();
    seen.maskWhole = shown();
    seen.maskWholeImages = all("#mask-chart image").length;
  }

  const bytes = get("#matrix-bytes");
  if (bytes) {
    bytes.click();
    seen.cellTipBytes = hovered("#matrix-chart .cell:not(.key)");
    seen.bytesPressed = bytes.getAttribute("aria-pressed");
  }

  if (get("#timeline")) {
    const chart = get("#timeline-chart");
    const widest = () => Math.max(0, ...all("#timeline-chart .span").map((span) => Number(span.getAttribute("width"))));
    const ticks = () => all("#timeline-chart text").map((text) => text.textContent).filter((text) => /\d .?s$/.test(text)).join("|");
    const before = [widest(), ticks()];
    get("[data-zoom=in]").click();
    get("[data-zoom=in]").click();
    seen.zoomWidens = widest() > before[0];
    seen.zoomMovesTicks = ticks() !== before[1];
    const zoomed = ticks();
    point(chart, "pointerdown", { button: 0, pointerId: 1, clientX: 600, clientY: 100 });
    try { point(chart, "pointermove", { buttons: 1, pointerId: 1, clientX: 500, clientY: 100 }); } catch (error) { seen.dragError = String(error); }
    chart.dispatchEvent(new PointerEvent("pointerup", { pointerId: 1 }));
    seen.dragMoves = ticks() !== zoomed;
    get("[data-zoom=all]").click();
    seen.allRestores = widest() === before[0] && ticks() === before[1];
    chart.dispatchEvent(new WheelEvent("wheel", { ctrlKey: true, deltaY: -400, clientX: 500, bubbles: true, cancelable: true }));
    seen.wheelZooms = ticks() !== before[1];
    press(chart, "0");
    seen.zeroRestores = ticks() === before[1];
    const output = get("#timeline-pages output");
    seen.firstPage = output.textContent;
    const next = get("[data-page='1']");
    seen.hasNext = !next.disabled;
    if (!next.disabled) {
      next.click();
      seen.secondPage = output.textContent;
      seen.secondPageTip = hovered("#timeline-chart .span");
      get("[data-page='-1']").click();
    }
    const slowest = get("[data-order='slowest first']");
    slowest.click();
    seen.slowestTip = hovered("#timeline-chart .span");
    get("[data-order='by rank']").click();
    const backward = get("[data-pass=backward]");
    if (backward) {
      backward.click();
      seen.backwardSpans = all("#timeline-chart .span").length;
      seen.backwardTip = hovered("#timeline-chart .span");
      get("[data-pass=forward]").click();
    }
    const choice = get("#timeline select");
    if (choice) {
      const pick = (name) => {
        choice.value = name;
        choice.dispatchEvent(new Event("change", { bubbles: true }));
      };
      const rows = all("#timeline tbody tr");
      pick(choice.options[1].value);
      seen.pickedSpans = all("#timeline-chart .span").length;
      seen.pickedRows = rows.filter((row) => row.offsetHeight > 0).map((row) => row.cells[0].textContent);
      pick(choice.options[0].value);
    }
    const measured = get("[data-source=measured]");
    if (measured) {
      measured.click();
      seen.predictedWhenMeasured = all("#timeline-chart .span.predicted").length;
      get("[data-source=both]").click();
    }
  }

  seen.wideness = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  seen.error = document.documentElement.dataset.error ?? null;
  seen.drawn = document.documentElement.dataset.drawn ?? null;
  const pre = document.createElement("pre");
  pre.id = "seen";
  pre.hidden = true;
  pre.textContent = JSON.stringify(seen);
  document.body.append(pre);
})();
